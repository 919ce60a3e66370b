// assert is built into NVRTC; this is for kernels that include <assert.h>.
#pragma once
