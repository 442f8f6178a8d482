// Host memory that is known to be pinned: the only one that copies read and write while the host goes on.
#pragma once

#include <c10/core/Allocator.h>

#include <memory>

namespace sim {

c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

// Keeps pinned memory from being given back until a copy has ended, as PyTorch's own allocators do.
std::shared_ptr<void> hold(const void* address);

void refuse_pinning(bool refuse);

}  // namespace sim
