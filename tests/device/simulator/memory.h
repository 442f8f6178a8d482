// The memory of the simulated devices.
//
// Each device has one range of memory that is mapped twice. Tensors hold addresses of the first mapping, which nobody may
// touch: a host that reads or writes them is stopped by the system at that instruction. Kernels and copies work in the
// second one.
//
// The allocator is that of a real device: what is released belongs to the stream that it was allocated on, which may use
// it again at once, behind the work that it has queued. There it is filled with 0xff, which is NaN in floating point and
// an index out of range: a copy on another stream that is still to read it brings nonsense back, and one that is still to
// write it is counted as a late write.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sim {

// On the current stream of the thread. Raises `c10::OutOfMemoryError` beyond the device's limit.
void* allocate(int device, int64_t stream, size_t bytes);
void release(void* address);

// Released memory is not used again before what `stream` has queued by then has run (`Tensor.record_stream`).
void also_used_on(void* address, int64_t stream);

// Where kernels find what the host calls `address`; null for null.
void* kernel_address(void* address);
int device_of(const void* address);  // -1: of none

void set_limit(int device, size_t bytes);  // of what is allocated at once; 0: none
// Refuses the allocations of at least `least` bytes that follow the next `after` ones of that size; `times` of them.
void refuse(int device, size_t least, int64_t after, int64_t times);
size_t allocated(int device);
size_t most_allocated(int device);
void forget_most_allocated(int device);

}  // namespace sim
