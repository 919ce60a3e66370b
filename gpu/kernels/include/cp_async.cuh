// Asynchronous copies from global to shared memory (sm_80 and later), by groups of one thread.
#pragma once

// The 32-bit address that instructions on shared memory take.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// cp.async.cg: 16 bytes to shared memory, past L1. Only the first `source_bytes` are read, the rest
// is filled with zeros; with 0 nothing is read and `source` may lie outside its allocation.
__device__ __forceinline__ void cp_async_16(unsigned shared, const void* source, int source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared),
               "l"(__cvta_generic_to_global(source)), "r"(source_bytes)
               : "memory");
}

// cp.async.commit_group: the copies since the last commit become one group (it may be empty).
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// cp.async.wait_group: until at most `PENDING` of this thread's youngest groups are under way. What
// other threads copied is visible only after a barrier as well.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
