#pragma once

/// Everything a training program needs. Narrower headers exist for each concept.
#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/inspect.h"
#include "hsdp/activation_checkpoint.h"
#include "hsdp/backend.h"
#include "hsdp/clip.h"
#include "hsdp/fully_shard.h"
#include "hsdp/grad_scaler.h"
#include "hsdp/init.h"
#include "hsdp/meta_init.h"
#include "hsdp/optimizer_in_backward.h"
#include "hsdp/optimizers.h"
#include "hsdp/parameter_groups.h"
#include "hsdp/replica_check.h"
#include "hsdp/summon_full.h"
#include "hsdp/weights.h"
