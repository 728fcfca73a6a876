#include "cuda_events.h"

#include <dlfcn.h>

#include <mutex>

namespace brickline {
namespace {

using CUresult = int;
using CUcontext = void*;
using CUevent = void*;
using CUstream = void*;

constexpr CUresult CUDA_SUCCESS = 0;
constexpr CUresult CUDA_ERROR_INVALID_CONTEXT = 201;
constexpr CUresult CUDA_ERROR_NOT_READY = 600;
constexpr unsigned EVENT_RECORD_EXTERNAL = 1;
constexpr int CAPTURE_MODE_RELAXED = 2;

// The driver's entry points; each is checked for presence once, here.
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
    std::string problem;

    template <class Function>
    void load(Function& function, const char* name) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        if (!function && problem.empty()) problem = std::string("the CUDA driver has no ") + name;
    }

    Driver() {
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
        if (problem.empty()) problem = check(init(0), "cuInit");
    }

    // "" or the driver's own words.
    std::string check(CUresult result, const char* call) const {
        if (result == CUDA_SUCCESS) return "";
        const char *name = nullptr, *text = nullptr;
        error_name(result, &name);
        error_text(result, &text);
        return std::string(call) + " failed: " + (name ? name : "unknown error") + " (" +
               std::to_string(result) + ")" + (text ? std::string(": ") + text : "");
    }
};

const Driver& driver() {
    static const Driver instance;
    return instance;
}

CUevent as_event(EventHandle event) { return reinterpret_cast<CUevent>(event); }
CUstream as_stream(uint64_t stream) { return reinterpret_cast<CUstream>(stream); }

// The profiler's device is current inside, whatever the caller's thread uses otherwise.
class InContext {
  public:
    explicit InContext(CUcontext context)
        : m_pushed(driver().context_push(context) == CUDA_SUCCESS) {}
    ~InContext() {
        CUcontext popped = nullptr;
        if (m_pushed) driver().context_pop(&popped);
    }
    InContext(const InContext&) = delete;
    InContext& operator=(const InContext&) = delete;

  private:
    bool m_pushed;
};

class CudaEvents final : public EventDriver {
  public:
    CudaEvents(int device, CUcontext context) : m_device(device), m_context(context) {}

    int device() const override { return m_device; }

    std::string create(EventHandle& event) override {
        CUevent made = nullptr;
        const InContext guard(m_context);
        const std::string problem = driver().check(driver().event_create(&made, 0), "cuEventCreate");
        event = reinterpret_cast<EventHandle>(made);
        return problem;
    }
    void destroy(EventHandle event) override { driver().event_destroy(as_event(event)); }

    std::string record(EventHandle event, uint64_t stream, bool captured) override {
        const unsigned flags = captured ? EVENT_RECORD_EXTERNAL : 0;
        CUresult result = driver().event_record(as_event(event), as_stream(stream), flags);
        if (result == CUDA_ERROR_INVALID_CONTEXT) {
            // The default stream of a thread that has not used the device yet.
            const InContext guard(m_context);
            result = driver().event_record(as_event(event), as_stream(stream), flags);
        }
        return driver().check(result, "cuEventRecordWithFlags");
    }
    State query(EventHandle event) override {
        const CUresult result = driver().event_query(as_event(event));
        if (result == CUDA_SUCCESS) return State::Done;
        return result == CUDA_ERROR_NOT_READY ? State::Pending : State::Failed;
    }
    std::string elapsed_ms(EventHandle from, EventHandle to, float& ms) override {
        return driver().check(driver().event_elapsed(&ms, as_event(from), as_event(to)),
                              "cuEventElapsedTime");
    }
    std::string synchronize(uint64_t stream) override {
        return driver().check(driver().stream_synchronize(as_stream(stream)), "cuStreamSynchronize");
    }
    bool is_capturing(uint64_t stream) override {
        int status = 0;
        // A legacy-stream query fails while another stream is captured; that stream is not ours.
        return driver().stream_is_capturing(as_stream(stream), &status) == CUDA_SUCCESS && status == 1;
    }
    void enter_thread() override {
        driver().context_set(m_context);
        int mode = CAPTURE_MODE_RELAXED;
        driver().exchange_capture_mode(&mode);
    }

  private:
    int m_device;
    CUcontext m_context;
};

}  // namespace

std::unique_ptr<EventDriver> open_cuda_events(int device, std::string& problem) {
    problem = driver().problem;
    if (!problem.empty()) return nullptr;
    int count = 0;
    problem = driver().check(driver().device_count(&count), "cuDeviceGetCount");
    if (!problem.empty()) return nullptr;
    if (device < 0 || device >= count) {
        problem = "there is no device CUDA:" + std::to_string(device) + "; this machine has " +
                  std::to_string(count);
        return nullptr;
    }
    CUcontext context = nullptr;
    driver().context_current(&context);
    int current = -1;
    if (!context || driver().context_device(&current) != CUDA_SUCCESS || current != device) {
        problem = "CUDA:" + std::to_string(device) +
                  " has no current context in this thread; use the device first (for example "
                  "torch.cuda.set_device and any tensor on it), or install brickline[cuda]";
        return nullptr;
    }
    return std::make_unique<CudaEvents>(device, context);
}

CudaDriverFacts cuda_driver_facts() {
    CudaDriverFacts facts;
    facts.problem = driver().problem;
    if (!facts.problem.empty()) return facts;
    facts.present = true;
    driver().driver_version(&facts.version);
    driver().device_count(&facts.devices);
    return facts;
}

}  // namespace brickline
