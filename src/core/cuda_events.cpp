#include "cuda_events.h"

#include "cuda_driver.h"

namespace brickline {
namespace {

constexpr unsigned EVENT_RECORD_EXTERNAL = 1;
constexpr int CAPTURE_MODE_RELAXED = 2;

CUevent as_event(EventHandle event) { return reinterpret_cast<CUevent>(event); }
CUstream as_stream(uint64_t stream) { return reinterpret_cast<CUstream>(stream); }

// The profiler's device is current inside, whatever the caller's thread uses otherwise.
class InContext {
  public:
    explicit InContext(CUcontext context)
        : m_pushed(cuda_driver().context_push(context) == CUDA_SUCCESS) {}
    ~InContext() {
        CUcontext popped = nullptr;
        if (m_pushed) cuda_driver().context_pop(&popped);
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
        const std::string problem = cuda_driver().check(cuda_driver().event_create(&made, 0), "cuEventCreate");
        event = reinterpret_cast<EventHandle>(made);
        return problem;
    }
    void destroy(EventHandle event) override { cuda_driver().event_destroy(as_event(event)); }

    std::string record(EventHandle event, uint64_t stream, bool captured) override {
        const unsigned flags = captured ? EVENT_RECORD_EXTERNAL : 0;
        CUresult result = cuda_driver().event_record(as_event(event), as_stream(stream), flags);
        if (result == CUDA_ERROR_INVALID_CONTEXT) {
            // The default stream of a thread that has not used the device yet.
            const InContext guard(m_context);
            result = cuda_driver().event_record(as_event(event), as_stream(stream), flags);
        }
        return cuda_driver().check(result, "cuEventRecordWithFlags");
    }
    State query(EventHandle event) override {
        const CUresult result = cuda_driver().event_query(as_event(event));
        if (result == CUDA_SUCCESS) return State::Done;
        return result == CUDA_ERROR_NOT_READY ? State::Pending : State::Failed;
    }
    std::string elapsed_ms(EventHandle from, EventHandle to, float& ms) override {
        return cuda_driver().check(cuda_driver().event_elapsed(&ms, as_event(from), as_event(to)),
                              "cuEventElapsedTime");
    }
    std::string synchronize(uint64_t stream) override {
        return cuda_driver().check(cuda_driver().stream_synchronize(as_stream(stream)), "cuStreamSynchronize");
    }
    bool is_capturing(uint64_t stream) override {
        int status = 0;
        // A legacy-stream query fails while another stream is captured; that stream is not ours.
        return cuda_driver().stream_is_capturing(as_stream(stream), &status) == CUDA_SUCCESS && status == 1;
    }
    void enter_thread() override {
        cuda_driver().context_set(m_context);
        int mode = CAPTURE_MODE_RELAXED;
        cuda_driver().exchange_capture_mode(&mode);
    }

  private:
    int m_device;
    CUcontext m_context;
};

}  // namespace

std::unique_ptr<EventDriver> open_cuda_events(int device, std::string& problem) {
    problem = cuda_driver().problem;
    if (!problem.empty()) return nullptr;
    int count = 0;
    problem = cuda_driver().check(cuda_driver().device_count(&count), "cuDeviceGetCount");
    if (!problem.empty()) return nullptr;
    if (device < 0 || device >= count) {
        problem = "there is no device CUDA:" + std::to_string(device) + "; this machine has " +
                  std::to_string(count);
        return nullptr;
    }
    CUcontext context = nullptr;
    cuda_driver().context_current(&context);
    int current = -1;
    if (!context || cuda_driver().context_device(&current) != CUDA_SUCCESS || current != device) {
        problem = "CUDA:" + std::to_string(device) +
                  " has no current context in this thread; use the device first (for example "
                  "torch.cuda.set_device and any tensor on it), or install brickline[cuda]";
        return nullptr;
    }
    return std::make_unique<CudaEvents>(device, context);
}

CudaDriverFacts cuda_driver_facts() {
    CudaDriverFacts facts;
    facts.problem = cuda_driver().problem;
    if (!facts.problem.empty()) return facts;
    facts.present = true;
    cuda_driver().driver_version(&facts.version);
    cuda_driver().device_count(&facts.devices);
    return facts;
}

}  // namespace brickline
