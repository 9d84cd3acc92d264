/* The header is C99: this file is compiled as such, and the struct has the same size on both sides. */
#include "moss_kernels.h"

uint32_t device_info_size_in_c(void) { return sizeof(MossDeviceInfo); }
