// Stands in for CUDA's header of this name where the sources in cuda/ are compiled for the host.
#pragma once
#include "cuda_host.h"
