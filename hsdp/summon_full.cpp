#include "hsdp/summon_full.h"

namespace hsdp {

SummonFull::SummonFull(const std::shared_ptr<ShardedModule>& module)
    : forward_(module), scheduler_(module->scheduler()) {
  scheduler_->summon();
}

SummonFull::~SummonFull() { scheduler_->dismiss(); }

}  // namespace hsdp
