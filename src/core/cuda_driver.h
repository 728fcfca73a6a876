// CUDA's driver, reached by dlopen, so that the module builds and loads without CUDA. Knows its entry
// points and nothing of what they are used for.
#pragma once

#include <string>

namespace brickline {

using CUresult = int;
using CUcontext = void*;
using CUevent = void*;
using CUfunction = void*;
using CUstream = void*;

constexpr CUresult CUDA_SUCCESS = 0;
constexpr CUresult CUDA_ERROR_INVALID_CONTEXT = 201;
constexpr CUresult CUDA_ERROR_NOT_READY = 600;

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
    std::string problem;  // "" or why there is no driver

    Driver();
    // "" or the driver's own words.
    std::string check(CUresult result, const char* call) const;

  private:
    template <class Function>
    void load(Function& function, const char* name);
};

const Driver& cuda_driver();

}  // namespace brickline
