// PlanProgram: the launches of a prepared plan with everything resolved but addresses and variables.
// Owns the argument values, evaluates what depends on variables, and runs the launches one after the
// other on CPU or CUDA. plan_threads.h and plan_graph.h run the same program in other ways.
//
// One run at a time; `set` and `bind` belong to the thread that runs. Knows no Python.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "brickline/launch.h"
#include "cuda_driver.h"
#include "expression.h"
#include "plan_stop.h"

namespace brickline {

enum class PlanDevice : uint8_t { Null = 0, Cpu = 1, Cuda = 2 };  // as DeviceKind numbers them

// A thread has no memory for a block; no kernel records this code.
constexpr uint32_t PLAN_NO_MEMORY = 0xffffffff;

enum PlanFlag : uint32_t {
    PLAN_MAY_OVERLAP = 1,  // with other launches
    PLAN_MAY_SPLIT = 2,    // its blocks may be executed by several threads
    PLAN_WAITS = 4,        // CUDA: it waits by itself for what it depends on, so it may begin early
};

struct PlanVariable {
    int64_t low = INT64_MIN, high = INT64_MAX;
    bool is_float = false;
};

struct PlanSlot {
    enum class Kind : uint8_t { Buffer, Value, Expression, Float };
    Kind kind = Kind::Value;
    uint32_t source = 0;     // the storage of a buffer, the variable of a float
    uint64_t bits = 0;       // the value, or a buffer's byte offset
    bool is_narrow = false;  // an expression is checked to fit int32; a float is an f32
    std::string code;        // of an expression
};

struct PlanSize {
    int64_t value = 1;
    std::string code;  // of an expression; "" where the value is known
};

struct PlanRow {
    uint64_t function = 0;
    uint64_t fault = 0;  // CUDA: address of the fault word that is passed last, 0: none is
    uint32_t flags = 0;
    std::vector<PlanSlot> slots;
    PlanSize sizes[7];  // blocks x y z, lanes x y z, bytes of shared memory
    std::vector<uint32_t> dependencies;  // launches that come earlier
};

union PlanValue {
    int64_t integer;
    double real;
};

// Why values were refused; nothing has changed then.
struct PlanRefusal {
    enum class Where : uint8_t { None, Variable, Size, Argument };
    enum class Why : uint8_t { Range, Overflow, DivisionByZero, Lanes };
    Where where = Where::None;
    Why why = Why::Range;
    int32_t launch = -1;
    uint32_t place = 0;  // the variable, the size or the slot
    bool is_float = false;
    PlanValue value = {};

    explicit operator bool() const { return where != Where::None; }
};

struct PlanOutcome {
    uint32_t done = 0;       // launches that are finished, on CUDA enqueued, all of them before `where`
    uint32_t code = 0;       // 0, or the fault of a kernel, on CUDA the driver's error
    int32_t where = -1;      // the launch that failed; -1: none did, or no single one
    const char* call = "";   // the driver's call that failed
    bool is_stopped = false; // before its end, by a PlanStop; `done` of several threads are then any
};

struct PlanTime {
    uint32_t worker = 0;  // 0: the thread that called
    uint64_t start_ns = 0, end_ns = 0;
};

struct PlanLaunch {
    brickline_launch host = {};  // the arguments and sizes, for CUDA too; one thread may run it as it is
    uint64_t function = 0;
    uint64_t version = 0;        // counts changes of the arguments and sizes
    uint32_t flags = 0;
    uint32_t fault = 0;          // the word of a serial run on CPU
};

// What launches wait for where they overlap: those that each one waits for by its data, and for one that
// may not overlap everything around it. Ascending, without repetition. `is_run`: of those that are not,
// nobody waits for them, nor do they; empty: all are. Throws std::invalid_argument where one would wait
// for a launch that is not earlier, or not run.
std::vector<std::vector<uint32_t>> plan_order(const std::vector<std::vector<uint32_t>>& waits,
                                              const std::vector<uint32_t>& flags,
                                              const std::vector<bool>& is_run = {});

// Makes a context current for as long as it lives, unless it already is.
class PlanContext {
  public:
    PlanContext(const Driver& driver, uint64_t context);
    ~PlanContext();
    PlanContext(const PlanContext&) = delete;
    PlanContext& operator=(const PlanContext&) = delete;

  private:
    const Driver& m_driver;
    bool m_pushed = false;
};

class PlanProgram {
  public:
    // Throws std::invalid_argument where the rows are not those of a program. `limits` bounds the seven
    // sizes and, last, the product of the lanes.
    PlanProgram(PlanDevice device, uint64_t context, std::vector<PlanVariable> variables,
                uint32_t storages, const std::vector<PlanRow>& rows, const uint64_t (&limits)[8],
                const Driver* driver = nullptr);
    PlanProgram(const PlanProgram&) = delete;
    PlanProgram& operator=(const PlanProgram&) = delete;

    PlanDevice device() const { return m_device; }
    uint64_t context() const { return m_context; }
    const Driver& driver() const { return *m_driver; }
    uint32_t size() const { return uint32_t(m_launches.size()); }
    const std::vector<PlanVariable>& variables() const { return m_variables; }
    uint32_t storages() const { return uint32_t(m_users.size()); }

    // An address changes; the next run uses it.
    void bind(uint32_t storage, uint64_t address);
    // One value for each variable. What does not depend on a changed one stays as it is.
    PlanRefusal set(const PlanValue* values);
    // "" where the program can run, else what is missing.
    std::string missing() const;

    // Launches [first, last). On CPU a fault ends the run; on CUDA launches are enqueued. `stop` is asked
    // between launches, null: never.
    PlanOutcome run_serial(uint64_t stream, uint32_t first, uint32_t last, PlanStop* stop = nullptr);
    // Enqueues one launch.
    CUresult enqueue(uint32_t launch, uint64_t stream) const;

    const PlanLaunch& launch(uint32_t i) const { return m_launches[i]; }
    // Changes whenever any launch does.
    uint64_t version() const { return m_version; }
    // The most that any launch needs.
    uint64_t shared_bytes() const { return m_shared_bytes; }

    // What launch i waits for where launches overlap: its dependencies, and for one that may not
    // overlap everything around it. Ascending, without repetition.
    const std::vector<uint32_t>& dependencies(uint32_t i) const { return m_dependencies[i]; }

    // Times of the last run on CPU, where they are taken.
    void set_timed(bool timed);
    bool is_timed() const { return m_is_timed; }
    std::vector<PlanTime>& times() { return m_times; }

  private:
    struct Dynamic {  // a size or a slot that depends on variables
        Expression expression;
        uint32_t place = 0;
        uint32_t variable = 0;  // of a float
        PlanRefusal::Where where = PlanRefusal::Where::Size;
        bool is_float = false, is_narrow = false;
    };
    struct Sizes {
        int64_t value[7];
    };
    struct Parts {  // what belongs to one launch
        uint32_t first_slot = 0;
        uint32_t first_dynamic = 0, last_dynamic = 0;
    };

    void add_row(const PlanRow& row, uint32_t launch, std::vector<std::vector<bool>>& uses);
    void add_dynamic(const PlanSlot& slot, uint32_t place, std::vector<bool>& used);
    Expression expression_of(const std::string& code, std::vector<bool>& used) const;
    PlanRefusal check_variables(const PlanValue* values) const;
    PlanRefusal stage(uint32_t launch, const PlanValue* values);
    PlanRefusal check_sizes(uint32_t launch, const Sizes& sizes) const;
    void commit(uint32_t launch, const uint64_t* staged);
    void apply_sizes(uint32_t launch);
    PlanOutcome run_host(uint32_t first, uint32_t last, PlanStop* stop);
    PlanOutcome run_cuda(uint64_t stream, uint32_t first, uint32_t last, PlanStop* stop) const;

    PlanDevice m_device;
    uint64_t m_context;
    const Driver* m_driver;
    uint64_t m_limits[8];
    std::vector<PlanVariable> m_variables;
    std::vector<PlanLaunch> m_launches;
    std::vector<Parts> m_parts;
    std::vector<Sizes> m_sizes;
    std::vector<uint64_t> m_slots;
    std::vector<void*> m_pointers;
    std::vector<Dynamic> m_dynamics;
    std::vector<std::vector<uint32_t>> m_dependents_of_variable;
    std::vector<std::vector<uint32_t>> m_dependencies;
    struct Use {
        uint32_t launch, slot;
        uint64_t offset;
    };
    std::vector<std::vector<Use>> m_users;  // of each storage
    std::vector<bool> m_is_bound;
    uint32_t m_unbound = 0;
    bool m_is_set = false;
    std::vector<PlanValue> m_values;
    std::vector<uint64_t> m_staged;       // results of the dynamics that `set` evaluates
    std::vector<uint32_t> m_touched;
    std::vector<uint64_t> m_stamps;       // by launch: the call of `set` that has looked at it
    uint64_t m_stamp = 0;
    uint64_t m_version = 1;
    uint64_t m_shared_bytes = 0;
    bool m_is_timed = false;
    std::vector<PlanTime> m_times;
};

}  // namespace brickline
