#pragma once

/// Everything a training program needs. Narrower headers exist for each concept.
#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/inspect.h"
#include "hsdp/backend.h"
#include "hsdp/clip.h"
#include "hsdp/fully_shard.h"
#include "hsdp/init.h"
#include "hsdp/meta_init.h"
#include "hsdp/summon_full.h"
#include "hsdp/weights.h"
