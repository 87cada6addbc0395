// cublas_v2.h of the emulation: cuBLASLt's types and status names; cublasGemm* are not emulated.
#pragma once
#include "cublasLt.h"
