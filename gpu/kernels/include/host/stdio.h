// printf is built into NVRTC; this is for kernels that include <stdio.h>.
#pragma once
