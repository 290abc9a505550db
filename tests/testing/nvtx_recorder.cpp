// A tool of NVTX, as Nsight Systems is one: a program loads it where NVTX_INJECTION64_PATH names it. It keeps what
// ranges of any thread begin and end.
#include <nvtx3/nvToolsExt.h>

#include <string>

namespace {

std::string& seen() {
  static std::string text;
  return text;
}

int NVTX_API push(const char* name) {
  seen() += std::string("push ") + name + "\n";
  return 0;
}

int NVTX_API pop() {
  seen() += "pop\n";
  return 0;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

/// Called once, by NVTX, with the tables that a tool fills in.
EXPORTED int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t export_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size) == 0) return 0;
  *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(&push);
  *table[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(&pop);
  return 1;
}

/// One line a call, for the test.
EXPORTED const char* nvtx_recorder_seen() { return seen().c_str(); }
