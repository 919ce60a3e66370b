// The device's mathematics is built into NVRTC; this is for kernels that include <math.h>.
#pragma once

#ifndef INFINITY
#define INFINITY (__int_as_float(0x7F800000))
#endif
#ifndef NAN
#define NAN (__int_as_float(0x7FFFFFFF))
#endif
#define M_PI 3.14159265358979323846
#define M_LOG2E 1.4426950408889634074
#define M_LN2 0.69314718055994530942
