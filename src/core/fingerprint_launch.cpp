// Shares the work of fingerprints out on a CUDA device, and enqueues it through the driver.
#include "cuda_driver.h"
#include "fingerprint.h"

namespace brickline {
namespace {

using namespace fingerprint;

constexpr uint32_t SMALL_THREADS = 128, LARGE_THREADS = 256;
constexpr uint64_t SMALL_BLOCKS = 4;  // one team of four warps does it at once
constexpr uint64_t ALIGNMENT = 16;       // of a thread's loads

uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

uint64_t elements_of(const TensorView& view) {
    uint64_t elements = 1;
    for (int k = 0; k < view.dimensions; ++k) elements *= uint64_t(view.shape[k]);
    return elements;
}

Job job_of(const DeviceTensor& tensor, uint32_t first_team, uint32_t teams, uint32_t warps) {
    const TensorView& view = tensor.view;
    Job job = {};
    job.data = reinterpret_cast<uint64_t>(view.data);
    job.row = tensor.row;
    job.elements = elements_of(view);
    job.stripes = Stripes::of(job.elements, view.dimensions ? uint64_t(view.shape[view.dimensions - 1]) : 1);
    const uint64_t step = uint64_t(teams) * warps * BLOCK;
    job.step_rows = step / job.stripes.columns;
    job.step_columns = step % job.stripes.columns;
    // A divisor of one has no magic number; fingerprint_cuda.h knows.
    const uint64_t quads = job.stripes.width / QUAD;
    if (quads > 1 && quads < NARROW) job.column_magic = uint32_t(ceil_div(1ull << 32, quads));
    if (job.stripes.columns > 1 && job.stripes.columns < BLOCK) {
        job.row_magic = uint32_t(ceil_div(1ull << 32, job.stripes.columns));
    }
    job.first_team = first_team;
    job.teams = teams;
    job.dtype = uint32_t(view.dtype);
    job.dimensions = uint32_t(view.dimensions);
    for (int k = 0; k < view.dimensions; ++k) job.shape[k] = view.shape[k];
    const int axes = merged_axes(view, job.axis_size, job.axis_stride);
    const bool is_dense = axes == 0 || (axes == 1 && job.axis_stride[0] == 1);
    job.axes = is_dense && job.data % ALIGNMENT == 0 ? 0 : uint32_t(axes ? axes : 1);
    if (!axes) job.axis_size[0] = 1;
    return job;
}

}  // namespace

DeviceLaunch share_out(const DeviceTensor* tensors, int count, uint32_t processors) {
    DeviceLaunch launch = {};
    uint64_t most = 0, all = 0;
    for (int k = 0; k < count; ++k) {
        const uint64_t blocks = ceil_div(elements_of(tensors[k].view), BLOCK);
        most = blocks > most ? blocks : most;
        all += blocks;
    }
    const bool is_small = most <= SMALL_BLOCKS;
    launch.threads = is_small ? SMALL_THREADS : LARGE_THREADS;
    launch.shared_bytes = TEAM_BYTES + THREAD_BYTES * launch.threads;
    const uint32_t warps = launch.threads / 32;
    // The last team reads what all others leave, so there are no more than can work at once.
    const uint32_t limit = 2 * processors;
    for (int k = 0; k < count; ++k) {
        const uint64_t blocks = ceil_div(elements_of(tensors[k].view), BLOCK);
        uint64_t teams = ceil_div(blocks, warps);
        const uint64_t share = all ? limit * blocks / all : 0;  // so that all end at about the same time
        if (teams > share) teams = share;
        if (teams == 0) teams = 1;
        launch.batch.job[k] = job_of(tensors[k], launch.teams, uint32_t(teams), warps);
        launch.teams += uint32_t(teams);
    }
    return launch;
}

std::string launch_on_cuda(const DeviceLaunch& launch, int count, uint64_t function, uint64_t context,
                           uint64_t stream, uint64_t scratch) {
    const Driver& driver = cuda_driver();
    if (!driver.problem.empty()) return driver.problem;
    void* parameters[] = {const_cast<Job*>(launch.batch.job), &scratch};
    (void)count;  // Batch<1> is the first job of the batch
    const auto enqueue = [&] {
        return driver.launch(reinterpret_cast<CUfunction>(function), launch.teams, 1, 1, launch.threads, 1, 1,
                             launch.shared_bytes, reinterpret_cast<CUstream>(stream), parameters, nullptr);
    };
    CUresult result = enqueue();
    if (result == CUDA_ERROR_INVALID_CONTEXT) {  // a thread that has not used the device yet
        CUcontext popped = nullptr;
        if (driver.context_push(reinterpret_cast<CUcontext>(context)) == CUDA_SUCCESS) {
            result = enqueue();
            driver.context_pop(&popped);
        }
    }
    return driver.check(result, "cuLaunchKernel");
}

}  // namespace brickline
