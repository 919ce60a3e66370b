// For kernels that include <stdlib.h>: what of it a device has is built into NVRTC.
#pragma once
