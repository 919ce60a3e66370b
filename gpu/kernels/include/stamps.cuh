// Stamps of time: when each warp was in which phase of a kernel, and on which SM.
//
// Compiled with -DSIMKIT_STAMPS=1, a kernel that opens with STAMPS has lane 0 of each warp write a
// record at every STAMP_BEGIN and STAMP_END, to the row of the warp in a buffer of the host's
// (gpu/stamps.py). Otherwise the macros are nothing. Records are written and never waited for. The
// compiler may move arithmetic over a stamp, but no access to memory and no `asm volatile`.
#pragma once

#ifdef SIMKIT_STAMPS

// gpu/stamps.py has the same names in the same order.
enum StampPhase : unsigned { kLoad, kWait, kScores, kSoftmax, kValues, kStore, kMerge };

struct StampRecord {
  unsigned long long time;  // %globaltimer, ns
  unsigned event;           // 2 * phase, + 1 at the end of the phase
  unsigned sm;
};

// Set by the host. The first record of a row says, as its time, how many the warp had to write.
struct StampBuffer {
  StampRecord* rows;
  unsigned row_records;  // the first one included
};
extern "C" {
__device__ StampBuffer simkit_stamps;
}

class Stamps {
  StampRecord* row;
  unsigned count = 0;
  bool writes;

 public:
  __device__ __forceinline__ Stamps() {
    const unsigned thread =
        (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const unsigned warps = (blockDim.x * blockDim.y * blockDim.z + 31) / 32;
    const unsigned long long cta =
        (static_cast<unsigned long long>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x +
        blockIdx.x;
    row = simkit_stamps.rows + (cta * warps + thread / 32) * simkit_stamps.row_records;
    writes = thread % 32 == 0;
  }

  __device__ __forceinline__ void write(unsigned event) {
    unsigned long long time;
    unsigned sm;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    ++count;
    if (writes && count < simkit_stamps.row_records) row[count] = {time, event, sm};
  }

  __device__ __forceinline__ ~Stamps() {
    if (writes) row[0] = {count, 0, 0};
  }
};

#define STAMPS Stamps stamps
#define STAMP_BEGIN(phase) stamps.write(2 * k##phase)
#define STAMP_END(phase) stamps.write(2 * k##phase + 1)

#else

#define STAMPS
#define STAMP_BEGIN(phase)
#define STAMP_END(phase)

#endif
