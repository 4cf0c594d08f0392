// Runs a CUDA kernel that was compiled as C++: threads as fibers, barriers, warp collectives, and a check before every
// load and store. Linked into each module, compiled without the checks itself.
//
// Blocks run one after another and the threads of a block in order, each straight through until it has to wait. A fault
// switches back to the scheduler, which abandons the launch: the faulting access never happens.
#include "cuda_host_runtime.hpp"

#include "cuda_host_fibers.hpp"
#include "cuda_host_memory.hpp"
#include "cuda_host_sanitizer.hpp"
#include "cuda_host_scheduler.hpp"
#include "cuda_host_warp.hpp"

#include "cuda_host_launch.hpp"
