// CUDA's driver, reached by dlopen, so that the module builds and loads without CUDA. Knows its entry
// points and nothing of what they are used for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace brickline {

using CUresult = int;
using CUcontext = void*;
using CUevent = void*;
using CUfunction = void*;
using CUgraph = void*;
using CUgraphExec = void*;
using CUgraphNode = void*;
using CUstream = void*;

constexpr CUresult CUDA_SUCCESS = 0;
constexpr CUresult CUDA_ERROR_INVALID_CONTEXT = 201;
constexpr CUresult CUDA_ERROR_NOT_READY = 600;

constexpr unsigned CUDA_EVENT_DISABLE_TIMING = 2;
constexpr int CUDA_CAPTURE_RELAXED = 2;
constexpr unsigned CUDA_HOST_PORTABLE_MAPPED = 1 | 2;
constexpr unsigned CUDA_STREAM_NON_BLOCKING = 1;

// CUDA_KERNEL_NODE_PARAMS_v2; the first version is the part before `kernel`.
struct CUkernelNode {
    CUfunction function = nullptr;
    unsigned grid[3] = {1, 1, 1};
    unsigned block[3] = {1, 1, 1};
    unsigned shared_bytes = 0;
    void** arguments = nullptr;
    void** extra = nullptr;
    void* kernel = nullptr;
    CUcontext context = nullptr;  // null: the current one
};

// CUgraphEdgeData.
struct CUedge {
    unsigned char from_port = 0;  // 1: a kernel's dependents may be launched before it has ended
    unsigned char to_port = 0;
    unsigned char type = 0;       // 1: programmatic
    unsigned char reserved[5] = {};
};
static_assert(sizeof(CUedge) == 8);

// Each entry point is checked for presence once, when the driver is loaded.
struct Driver {
    void* library = nullptr;
    CUresult (*init)(unsigned) = nullptr;
    CUresult (*driver_version)(int*) = nullptr;
    CUresult (*device_count)(int*) = nullptr;
    CUresult (*context_current)(CUcontext*) = nullptr;
    CUresult (*context_set)(CUcontext) = nullptr;
    CUresult (*context_push)(CUcontext) = nullptr;
    CUresult (*context_pop)(CUcontext*) = nullptr;
    CUresult (*context_device)(int*) = nullptr;
    CUresult (*event_create)(CUevent*, unsigned) = nullptr;
    CUresult (*event_destroy)(CUevent) = nullptr;
    CUresult (*event_record)(CUevent, CUstream, unsigned) = nullptr;
    CUresult (*event_query)(CUevent) = nullptr;
    CUresult (*event_elapsed)(float*, CUevent, CUevent) = nullptr;
    CUresult (*stream_synchronize)(CUstream) = nullptr;
    CUresult (*stream_is_capturing)(CUstream, int*) = nullptr;
    CUresult (*exchange_capture_mode)(int*) = nullptr;
    CUresult (*error_name)(CUresult, const char**) = nullptr;
    CUresult (*error_text)(CUresult, const char**) = nullptr;
    CUresult (*launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       CUstream, void**, void**) = nullptr;
    // Newer drivers alone have these: null where they are missing.
    CUresult (*launch_cooperative)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   unsigned, CUstream, void**) = nullptr;
    CUresult (*copy_to_device)(uint64_t, const void*, size_t, CUstream) = nullptr;
    CUresult (*fill_words)(uint64_t, unsigned, size_t, CUstream) = nullptr;
    CUresult (*copy_from_device)(void*, uint64_t, size_t, CUstream) = nullptr;
    CUresult (*memory_allocate)(uint64_t*, size_t) = nullptr;
    CUresult (*memory_free)(uint64_t) = nullptr;
    CUresult (*host_allocate)(void**, size_t, unsigned) = nullptr;
    CUresult (*host_free)(void*) = nullptr;
    CUresult (*host_address)(uint64_t*, void*, unsigned) = nullptr;  // as the device sees it
    CUresult (*stream_create)(CUstream*, unsigned) = nullptr;
    CUresult (*stream_destroy)(CUstream) = nullptr;
    CUresult (*stream_query)(CUstream) = nullptr;
    CUresult (*stream_wait)(CUstream, CUevent, unsigned) = nullptr;
    CUresult (*begin_capture)(CUstream, int) = nullptr;
    CUresult (*end_capture)(CUstream, CUgraph*) = nullptr;
    CUresult (*capture_info)(CUstream, int*, uint64_t*, CUgraph*, const CUgraphNode**, size_t*) = nullptr;
    CUresult (*graph_create)(CUgraph*, unsigned) = nullptr;
    CUresult (*graph_destroy)(CUgraph) = nullptr;
    CUresult (*graph_add_kernel)(CUgraphNode*, CUgraph, const CUgraphNode*, size_t,
                                 const CUkernelNode*) = nullptr;
    CUresult (*graph_add_edges)(CUgraph, const CUgraphNode*, const CUgraphNode*, const CUedge*,
                                size_t) = nullptr;
    CUresult (*graph_nodes)(CUgraph, CUgraphNode*, size_t*) = nullptr;
    CUresult (*graph_edges)(CUgraph, CUgraphNode*, CUgraphNode*, size_t*) = nullptr;
    CUresult (*graph_instantiate)(CUgraphExec*, CUgraph, unsigned long long) = nullptr;
    CUresult (*graph_exec_destroy)(CUgraphExec) = nullptr;
    CUresult (*graph_set_kernel)(CUgraphExec, CUgraphNode, const CUkernelNode*) = nullptr;
    CUresult (*graph_launch)(CUgraphExec, CUstream) = nullptr;
    std::string problem;  // "" or why there is no driver

    struct Nothing {};
    Driver();
    // Without any entry point: for tests, which supply their own.
    explicit Driver(Nothing) {}
    // "" or the driver's own words.
    std::string check(CUresult result, const char* call) const;

  private:
    template <class Function>
    void load(Function& function, const char* name);
    // The first of these names that there is.
    template <class Function>
    void find(Function& function, const char* name, const char* older = nullptr);
};

const Driver& cuda_driver();

}  // namespace brickline
