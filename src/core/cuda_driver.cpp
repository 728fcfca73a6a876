#include "cuda_driver.h"

#include <dlfcn.h>

namespace brickline {

template <class Function>
void Driver::load(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function && problem.empty()) problem = std::string("the CUDA driver has no ") + name;
}

template <class Function>
void Driver::find(Function& function, const char* name, const char* older) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function && older) function = reinterpret_cast<Function>(dlsym(library, older));
}

Driver::Driver() {
    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        problem = "no CUDA driver on this machine (libcuda.so.1 cannot be loaded)";
        return;
    }
    load(init, "cuInit");
    load(driver_version, "cuDriverGetVersion");
    load(device_count, "cuDeviceGetCount");
    load(context_current, "cuCtxGetCurrent");
    load(context_set, "cuCtxSetCurrent");
    load(context_push, "cuCtxPushCurrent_v2");
    load(context_pop, "cuCtxPopCurrent_v2");
    load(context_device, "cuCtxGetDevice");
    load(event_create, "cuEventCreate");
    load(event_destroy, "cuEventDestroy_v2");
    load(event_record, "cuEventRecordWithFlags");
    load(event_query, "cuEventQuery");
    load(event_elapsed, "cuEventElapsedTime");
    load(stream_synchronize, "cuStreamSynchronize");
    load(stream_is_capturing, "cuStreamIsCapturing");
    load(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
    load(error_name, "cuGetErrorName");
    load(error_text, "cuGetErrorString");
    load(launch, "cuLaunchKernel");
    find(launch_cooperative, "cuLaunchCooperativeKernel");
    find(copy_to_device, "cuMemcpyHtoDAsync_v2");
    find(fill_words, "cuMemsetD32Async");
    find(copy_from_device, "cuMemcpyDtoHAsync_v2");
    find(memory_allocate, "cuMemAlloc_v2");
    find(memory_free, "cuMemFree_v2");
    find(host_allocate, "cuMemHostAlloc");
    find(host_free, "cuMemFreeHost");
    find(host_address, "cuMemHostGetDevicePointer_v2");
    find(stream_create, "cuStreamCreate");
    find(stream_destroy, "cuStreamDestroy_v2");
    find(stream_query, "cuStreamQuery");
    find(stream_wait, "cuStreamWaitEvent");
    find(begin_capture, "cuStreamBeginCapture_v2");
    find(end_capture, "cuStreamEndCapture");
    find(capture_info, "cuStreamGetCaptureInfo_v2");
    find(graph_create, "cuGraphCreate");
    find(graph_destroy, "cuGraphDestroy");
    find(graph_add_kernel, "cuGraphAddKernelNode_v2", "cuGraphAddKernelNode");
    find(graph_add_edges, "cuGraphAddDependencies_v2");
    find(graph_nodes, "cuGraphGetNodes");
    find(graph_edges, "cuGraphGetEdges");
    find(graph_instantiate, "cuGraphInstantiateWithFlags");
    find(graph_exec_destroy, "cuGraphExecDestroy");
    find(graph_set_kernel, "cuGraphExecKernelNodeSetParams_v2", "cuGraphExecKernelNodeSetParams");
    find(graph_launch, "cuGraphLaunch");
    if (problem.empty()) problem = check(init(0), "cuInit");
}

std::string Driver::check(CUresult result, const char* call) const {
    if (result == CUDA_SUCCESS) return "";
    const char *name = nullptr, *text = nullptr;
    if (error_name) error_name(result, &name);
    if (error_text) error_text(result, &text);
    return std::string(call) + " failed: " + (name ? name : "unknown error") + " (" +
           std::to_string(result) + ")" + (text ? std::string(": ") + text : "");
}

const Driver& cuda_driver() {
    static const Driver instance;
    return instance;
}

}  // namespace brickline
