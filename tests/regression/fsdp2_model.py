"""The transformer of models/ in PyTorch, with the same names and the same operators."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class RmsNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotated(x, tables):
    cos, sin = tables
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head = c["hidden_size"] // c["n_heads"]
        heads = c["n_kv_heads"] or c["n_heads"]
        self.grouped = heads != c["n_heads"]
        self.q_proj = nn.Linear(c["hidden_size"], c["hidden_size"], bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], heads * self.head, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], heads * self.head, bias=False)
        self.o_proj = nn.Linear(c["hidden_size"], c["hidden_size"], bias=False)

    def forward(self, x, tables):
        q, k, v = (p(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(
            rotated(q, tables), rotated(k, tables), v, is_causal=True, enable_gqa=self.grouped
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = FeedForward(c)
        self.input_layernorm = RmsNorm(c["hidden_size"], c["norm_eps"])
        self.post_attention_layernorm = RmsNorm(c["hidden_size"], c["norm_eps"])

    def forward(self, x, tables):
        y = x + self.self_attn(self.input_layernorm(x), tables)
        return y + self.mlp(self.post_attention_layernorm(y))


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head, self.theta = c["hidden_size"] // c["n_heads"], c["rope_theta"]
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Block(c) for _ in range(c["n_layers"]))
        self.norm = RmsNorm(c["hidden_size"], c["norm_eps"])

    def forward(self, ids):
        x = self.embed_tokens(ids)
        options = {"dtype": torch.float32, "device": x.device}
        frequencies = torch.pow(self.theta, torch.arange(0, self.head, 2, **options) / -float(self.head))
        angles = torch.outer(torch.arange(ids.shape[1], **options), frequencies).repeat(1, 2)
        tables = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, tables)
        return self.norm(x)


class Transformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.model = Decoder(c)
        self.lm_head = None if c["tie_embeddings"] else nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        residual = 0.02 / math.sqrt(2 * c["n_layers"])
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, 0.0, residual if "o_proj" in name or "down_proj" in name else 0.02)

    def forward(self, ids):
        x = self.model(ids)
        return self.lm_head(x) if self.lm_head is not None else F.linear(x, self.model.embed_tokens.weight)
