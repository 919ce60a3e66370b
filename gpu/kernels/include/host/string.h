// For kernels that include <string.h>: what of it a device has is built into NVRTC.
#pragma once
