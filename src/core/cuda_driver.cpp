#include "cuda_driver.h"

#include <dlfcn.h>

namespace brickline {

template <class Function>
void Driver::load(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function && problem.empty()) problem = std::string("the CUDA driver has no ") + name;
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
    if (problem.empty()) problem = check(init(0), "cuInit");
}

std::string Driver::check(CUresult result, const char* call) const {
    if (result == CUDA_SUCCESS) return "";
    const char *name = nullptr, *text = nullptr;
    error_name(result, &name);
    error_text(result, &text);
    return std::string(call) + " failed: " + (name ? name : "unknown error") + " (" +
           std::to_string(result) + ")" + (text ? std::string(": ") + text : "");
}

const Driver& cuda_driver() {
    static const Driver instance;
    return instance;
}

}  // namespace brickline
