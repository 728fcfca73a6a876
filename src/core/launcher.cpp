// LauncherObject: one compiled kernel, ready to be called with its arguments. Checks what it is given
// (dtype, shape, device, alignment, overlap, bounds), evaluates the launch shape, and launches: a
// function on the host, a kernel through CUDA's driver. Raw C-API, because this is the hot path of
// every kernel; errors name the kernel and the argument.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "brickline/launch.h"
#include "buffers.h"
#include "cuda_driver.h"
#include "expression.h"
#include "host_scratch.h"
#include "hot.h"

namespace brickline::hot {
namespace {

using HostFunction = void (*)(const brickline_launch*);

constexpr size_t MAX_ARGUMENTS = 64;

enum class ScalarType : uint8_t { Integer, F64, F32 };

struct Argument {
    PyObject* name = nullptr;  // interned; strong
    bool is_buffer = false;
    // Buffers.
    uint8_t dtype = 0;
    bool is_written = false;
    uint32_t align = 1;
    std::vector<Expression> shape;
    // Scalars.
    ScalarType type = ScalarType::Integer;
    int64_t low = INT64_MIN, high = INT64_MAX;
};

struct Plan {  // what a launcher knows beside its Python objects
    std::vector<Argument> arguments;
    Expression sizes[7];       // blocks x y z, lanes x y z, bytes of shared memory
    uint64_t limits[8];        // the most of each; the last bounds the product of lanes
    DeviceKind kind = DeviceKind::Null;
    int number = 0;
    uint64_t function = 0;
    uint64_t context = 0;      // CUDA: made current where a thread has none
    uint64_t fault = 0;        // CUDA: address of the fault word that is passed last, 0: none is
};

struct LauncherObject {
    PyObject_HEAD
    vectorcallfunc call;
    Plan* plan;
    PyObject* name;     // of the kernel
    PyObject* owner;    // keeps the code loaded
    PyObject* convert;  // callable(object, launcher, argument name) -> Buffer
    PyObject* dtypes;   // tuple of names by code, for messages
    PyObject* size_texts;  // tuple of the seven expressions as text, for messages
    PyObject* weakrefs;
};

PyTypeObject LauncherType = {PyVarObject_HEAD_INIT(nullptr, 0)};

const char* const SIZE_NAMES[7] = {"global_size[0]", "global_size[1]", "global_size[2]", "local_size[0]",
                                   "local_size[1]", "local_size[2]", "shared_bytes"};

LauncherObject* as_launcher(PyObject* object) { return reinterpret_cast<LauncherObject*>(object); }

PyObject* dtype_name(LauncherObject* launcher, uint8_t code) {
    return code < PyTuple_GET_SIZE(launcher->dtypes) ? PyTuple_GET_ITEM(launcher->dtypes, code) : Py_None;
}

// ------------------------------------------------------------------------------- the given arguments

// "x, y, n": what a kernel takes.
std::string argument_names(const LauncherObject* launcher) {
    std::string text;
    for (const Argument& argument : launcher->plan->arguments) {
        const char* name = PyUnicode_AsUTF8(argument.name);
        text += (text.empty() ? "" : ", ") + std::string(name ? name : "?");
    }
    return text;
}

// Puts arguments where the signature has them; false with an exception set.
bool place(LauncherObject* launcher, PyObject* const* args, Py_ssize_t count, PyObject* names,
           PyObject** given, PyObject** stream) {
    const std::vector<Argument>& expected = launcher->plan->arguments;
    const Py_ssize_t wanted = Py_ssize_t(expected.size());
    if (count > wanted) {
        raise_error("LaunchError", "kernel %U takes %zd arguments (%s), got %zd", launcher->name, wanted,
                    argument_names(launcher).c_str(), count);
        return false;
    }
    std::copy(args, args + count, given);
    std::fill(given + count, given + wanted, nullptr);
    const Py_ssize_t keywords = names ? PyTuple_GET_SIZE(names) : 0;
    for (Py_ssize_t i = 0; i < keywords; ++i) {
        PyObject* name = PyTuple_GET_ITEM(names, i);
        // Callers name arguments in order, so the next empty place is tried first.
        Py_ssize_t at = std::min(count + i, wanted);
        if (at == wanted || expected[at].name != name) {
            for (at = 0; at < wanted && !name_is(name, expected[at].name); ++at) {}
        }
        if (at == wanted) {
            if (PyUnicode_CompareWithASCIIString(name, "stream") == 0) {
                *stream = args[count + i];
                continue;
            }
            raise_error("LaunchError", "kernel %U has no argument %R; it takes %s", launcher->name, name,
                        argument_names(launcher).c_str());
            return false;
        }
        if (given[at]) {
            raise_error("LaunchError", "kernel %U: argument %U was given twice", launcher->name, name);
            return false;
        }
        given[at] = args[count + i];
    }
    for (Py_ssize_t at = 0; at < wanted; ++at) {
        if (given[at]) continue;
        raise_error("LaunchError", "kernel %U: argument %U is missing; it takes %s", launcher->name,
                    expected[at].name, argument_names(launcher).c_str());
        return false;
    }
    return true;
}

// Refuses a value that is no such number, in the place of what its conversion raised; one whose repr
// fails, as that of an integer of many thousand digits does, is named by its type.
bool refuse_scalar(LauncherObject* launcher, const Argument& argument, PyObject* object, const char* error,
                   const char* expected) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return false;  // an interrupt
    PyErr_Clear();
    PyObject* text = PyObject_Repr(object);
    if (!text) {
        PyErr_Clear();
        text = PyUnicode_FromFormat("a value of type %s", Py_TYPE(object)->tp_name);
    }
    if (text) {
        raise_error(error, "kernel %U: %s%U: expected %s, got %.200U", launcher->name,
                    argument.type == ScalarType::Integer ? "variable " : "", argument.name, expected, text);
    }
    Py_XDECREF(text);
    return false;
}

// Reads a scalar into its slot, and into `value` where expressions may use it.
bool read_scalar(LauncherObject* launcher, const Argument& argument, PyObject* object, uint64_t& slot,
                 int64_t& value) {
    if (argument.type != ScalarType::Integer) {
        const double number = PyBool_Check(object) ? -1.0 : PyFloat_AsDouble(object);
        if (number == -1.0 && (PyErr_Occurred() || PyBool_Check(object))) {
            return refuse_scalar(launcher, argument, object, "LaunchError", "a number");
        }
        if (argument.type == ScalarType::F64) {
            std::memcpy(&slot, &number, 8);
            return true;
        }
        // Half a unit beyond the largest float a double rounds to infinity.
        if (std::isfinite(number) && std::fabs(number) >= 0x1.ffffffp127) [[unlikely]] {
            return refuse_scalar(launcher, argument, object, "LaunchError", "a number that fits f32");
        }
        const float narrow = float(number);
        std::memcpy(&slot, &narrow, 4);
        return true;
    }
    int overflow = 0;
    if (PyLong_CheckExact(object)) [[likely]] {
        value = PyLong_AsLongLongAndOverflow(object, &overflow);
    } else if (PyIndex_Check(object) && !PyBool_Check(object)) {
        PyObject* number = PyNumber_Index(object);
        if (!number) return refuse_scalar(launcher, argument, object, "SymbolicError", "a whole number");
        value = PyLong_AsLongLongAndOverflow(number, &overflow);
        Py_DECREF(number);
    } else {
        return refuse_scalar(launcher, argument, object, "SymbolicError", "a whole number");
    }
    if (overflow || value < argument.low || value > argument.high) [[unlikely]] {
        const std::string expected =
            "a value from " + std::to_string(argument.low) + " to " + std::to_string(argument.high);
        return refuse_scalar(launcher, argument, object, "SymbolicError", expected.c_str());
    }
    slot = uint64_t(value);  // whatever its size: the low bytes come first
    return true;
}

bool refuse_fault(LauncherObject* launcher, const char* what, PyObject* name, ExpressionFault fault) {
    const char* why = fault == ExpressionFault::Overflow ? "leaves 64 bits" : "divides by zero";
    if (name) raise_error("SymbolicError", "kernel %U: the %s of %U %s", launcher->name, what, name, why);
    else raise_error("SymbolicError", "kernel %U: %s %s", launcher->name, what, why);
    return false;
}

bool refuse_shape(LauncherObject* launcher, const Argument& argument, const BufferObject* buffer,
                  const int64_t* values) {
    PyObject* expected = PyTuple_New(Py_ssize_t(argument.shape.size()));
    ExpressionFault fault = ExpressionFault::None;
    for (size_t i = 0; expected && fault == ExpressionFault::None && i < argument.shape.size(); ++i) {
        int64_t size = 0;
        fault = argument.shape[i].evaluate(values, size);
        PyTuple_SET_ITEM(expected, Py_ssize_t(i), PyLong_FromLongLong(size));
    }
    PyObject* got = shape_tuple(buffer);
    if (fault != ExpressionFault::None) {
        refuse_fault(launcher, "shape", argument.name, fault);
    } else if (expected && got) {
        raise_error("LaunchError", "kernel %U: %U: expected shape %R, got %R", launcher->name,
                    argument.name, expected, got);
    }
    Py_XDECREF(expected);
    Py_XDECREF(got);
    return false;
}

bool check_buffer(LauncherObject* launcher, const Argument& argument, const BufferObject* buffer,
                  const int64_t* values) {
    const Plan& plan = *launcher->plan;
    if (buffer->kind != plan.kind || buffer->number != plan.number) {
        PyObject* wanted = device_name(plan.kind, plan.number);
        PyObject* got = device_name(buffer->kind, buffer->number);
        raise_error("LaunchError", "kernel %U is compiled for %S; %U lies on %S: copy it there with "
                    "device.copy, or compile the kernel for %S", launcher->name, wanted, argument.name, got, got);
        Py_XDECREF(wanted);
        Py_XDECREF(got);
        return false;
    }
    if (buffer->dtype != argument.dtype) {
        raise_error("LaunchError", "kernel %U: %U: expected %S, got %S", launcher->name, argument.name,
                    dtype_name(launcher, argument.dtype), dtype_name(launcher, buffer->dtype));
        return false;
    }
    if (buffer->dimensions != argument.shape.size()) {
        return refuse_shape(launcher, argument, buffer, values);
    }
    for (size_t i = 0; i < argument.shape.size(); ++i) {
        int64_t size = 0;
        const ExpressionFault fault = argument.shape[i].evaluate(values, size);
        if (fault != ExpressionFault::None) return refuse_fault(launcher, "shape", argument.name, fault);
        if (size != buffer->shape[i]) return refuse_shape(launcher, argument, buffer, values);
    }
    if ((buffer->address & (argument.align - 1)) && buffer->bytes) {
        raise_error("LaunchError", "kernel %U: %U: expected memory aligned to %u bytes, got address %p; "
                    "copy it, or begin the view at a multiple", launcher->name, argument.name,
                    unsigned(argument.align), reinterpret_cast<void*>(buffer->address));
        return false;
    }
    if (argument.is_written && buffer->is_read_only) {
        raise_error("LaunchError", "kernel %U writes to %U, whose memory is read-only; pass a writable "
                    "array", launcher->name, argument.name);
        return false;
    }
    return true;
}

// Nothing that is written may overlap another argument: the order of its reads is not defined.
bool check_overlap(LauncherObject* launcher, const BufferObject* const* buffers, size_t count) {
    const std::vector<Argument>& arguments = launcher->plan->arguments;
    for (size_t i = 0; i < count; ++i) {
        if (!buffers[i] || !arguments[i].is_written) continue;
        for (size_t j = 0; j < count; ++j) {
            if (j == i || !buffers[j] || (arguments[j].is_written && j < i)) continue;
            const uint64_t begin = std::max(buffers[i]->address, buffers[j]->address);
            const uint64_t end = std::min(buffers[i]->address + buffers[i]->bytes,
                                          buffers[j]->address + buffers[j]->bytes);
            if (begin >= end) continue;
            raise_error("LaunchError", "kernel %U writes to %U, which shares %llu bytes with %U; pass "
                        "memory of its own, or declare one read-write argument", launcher->name,
                        arguments[i].name, static_cast<unsigned long long>(end - begin), arguments[j].name);
            return false;
        }
    }
    return true;
}

// " with n=5, m=3": the variables of a launch.
std::string values_text(const LauncherObject* launcher, const int64_t* values) {
    std::string text;
    for (size_t i = 0; i < launcher->plan->arguments.size(); ++i) {
        const Argument& argument = launcher->plan->arguments[i];
        if (argument.is_buffer || argument.type != ScalarType::Integer) continue;
        const char* name = PyUnicode_AsUTF8(argument.name);
        text += (text.empty() ? " with " : ", ") + std::string(name ? name : "?") + "=" +
                std::to_string(values[i]);
    }
    return text;
}

bool evaluate_sizes(LauncherObject* launcher, const int64_t* values, int64_t* sizes) {
    const Plan& plan = *launcher->plan;
    uint64_t lanes = 1;
    for (int i = 0; i < 7; ++i) {
        const ExpressionFault fault = plan.sizes[i].evaluate(values, sizes[i]);
        if (fault != ExpressionFault::None) return refuse_fault(launcher, SIZE_NAMES[i], nullptr, fault);
        const int64_t least = i < 6 ? 1 : 0;
        if (sizes[i] < least || uint64_t(sizes[i]) > plan.limits[i]) [[unlikely]] {
            PyObject* device = device_name(plan.kind, plan.number);
            raise_error("LaunchError", "kernel %U: %s = %S is %lld%s; %S takes %lld to %llu%s",
                        launcher->name, SIZE_NAMES[i], PyTuple_GET_ITEM(launcher->size_texts, i),
                        static_cast<long long>(sizes[i]), values_text(launcher, values).c_str(), device,
                        static_cast<long long>(least), static_cast<unsigned long long>(plan.limits[i]),
                        sizes[i] < least ? ": skip the launch" : "");
            Py_XDECREF(device);
            return false;
        }
        if (i >= 3 && i < 6) lanes *= uint64_t(sizes[i]);
    }
    if (lanes > plan.limits[7]) {
        raise_error("LaunchError", "kernel %U: a block of %llu lanes; the device takes at most %llu",
                    launcher->name, static_cast<unsigned long long>(lanes),
                    static_cast<unsigned long long>(plan.limits[7]));
        return false;
    }
    return true;
}

// ------------------------------------------------------------------------------------------ launching

bool launch_host(LauncherObject* launcher, void** pointers, const int64_t* sizes) {
    void* shared = host_scratch().of(uint64_t(sizes[6]));
    if (sizes[6] && !shared) {
        PyErr_NoMemory();
        return false;
    }
    uint32_t fault = 0;
    brickline_launch launch{};
    launch.arguments = pointers;
    launch.last = 1;
    for (int i = 0; i < 3; ++i) {
        launch.grid[i] = uint32_t(sizes[i]);
        launch.lanes[i] = uint32_t(sizes[3 + i]);
        launch.last *= uint64_t(sizes[i]);
    }
    launch.shared = shared;
    launch.shared_bytes = uint64_t(sizes[6]);
    launch.fault = &fault;
    const auto function = reinterpret_cast<HostFunction>(launcher->plan->function);
    Py_BEGIN_ALLOW_THREADS
    function(&launch);
    Py_END_ALLOW_THREADS
    if (!fault) [[likely]] return true;
    PyObject* module = PyImport_ImportModule("brickline.device.base");
    PyObject* text = module ? PyObject_CallMethod(module, "fault_text", "I", unsigned(fault)) : nullptr;
    if (text) raise_error("LaunchError", "kernel %U reported %S", launcher->name, text);
    Py_XDECREF(module);
    Py_XDECREF(text);
    return false;
}

// The stream to launch into: the one given, else torch's current one, else the default stream.
bool find_stream(LauncherObject* launcher, PyObject* given, uint64_t& stream) {
    static PyObject* getter = nullptr;  // torch's, once torch has been imported
    if (given && given != Py_None) {
        PyObject* number = PyLong_CheckExact(given) ? Py_NewRef(given) : nullptr;
        if (!number) {
            PyObject* module = PyImport_ImportModule("brickline.device.cuda_context");
            number = module ? PyObject_CallMethod(module, "stream_handle", "O", given) : nullptr;
            Py_XDECREF(module);
        }
        if (!number) return false;
        stream = PyLong_AsUnsignedLongLong(number);
        Py_DECREF(number);
        return !PyErr_Occurred();
    }
    if (!getter) {
        PyObject* torch = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");
        PyObject* core = torch ? PyObject_GetAttrString(torch, "_C") : nullptr;
        getter = core ? PyObject_GetAttrString(core, "_cuda_getCurrentRawStream") : nullptr;
        Py_XDECREF(core);
        PyErr_Clear();
    }
    stream = 0;
    if (!getter) return true;
    PyObject* device = PyLong_FromLong(launcher->plan->number);
    PyObject* current = device ? PyObject_CallOneArg(getter, device) : nullptr;
    Py_XDECREF(device);
    if (!current) return false;
    stream = PyLong_AsUnsignedLongLong(current);
    Py_DECREF(current);
    return !PyErr_Occurred();
}

bool launch_cuda(LauncherObject* launcher, void** pointers, const int64_t* sizes, PyObject* given) {
    const Plan& plan = *launcher->plan;
    uint64_t stream = 0;
    if (!find_stream(launcher, given, stream)) return false;
    const Driver& driver = cuda_driver();
    auto launch = [&] {
        return driver.launch(reinterpret_cast<CUfunction>(plan.function), unsigned(sizes[0]),
                             unsigned(sizes[1]), unsigned(sizes[2]), unsigned(sizes[3]),
                             unsigned(sizes[4]), unsigned(sizes[5]), unsigned(sizes[6]),
                             reinterpret_cast<CUstream>(stream), pointers, nullptr);
    };
    CUresult result = launch();
    if (result == CUDA_ERROR_INVALID_CONTEXT && plan.context) {
        driver.context_set(reinterpret_cast<CUcontext>(plan.context));  // a thread's first use
        result = launch();
    }
    if (result == CUDA_SUCCESS) [[likely]] return true;
    raise_error("LaunchError", "kernel %U: %s", launcher->name,
                driver.check(result, "cuLaunchKernel").c_str());
    return false;
}

// The dtype of an element in the buffer protocol's words; 0 for what dtypes.py does not have.
uint8_t dtype_of_format(const char* format, Py_ssize_t bytes) {
    enum : uint8_t { F64 = 1, F32, F16, I64 = 7, I32, I16, I8, U64, U32, U16, U8, BOOL };
    if (!format) return U8;
    if (*format == '@' || *format == '=' || *format == '<') ++format;
    if (!format[0] || format[1]) return 0;
    const bool is_signed = std::strchr("bhilq", *format), is_unsigned = std::strchr("BHILQ", *format);
    if (is_signed || is_unsigned) {
        const uint8_t size = bytes == 8 ? 0 : bytes == 4 ? 1 : bytes == 2 ? 2 : 3;
        return uint8_t((is_signed ? I64 : U64) + size);
    }
    switch (*format) {
        case 'd': return F64;
        case 'f': return F32;
        case 'e': return F16;
        case '?': return BOOL;
        default: return 0;
    }
}

// The buffers of one launch: those that were given, and what stands for arrays until it is done.
class Buffers {
  public:
    ~Buffers() {
        while (m_views) PyBuffer_Release(&m_view[--m_views]);
        while (m_made) Py_DECREF(m_object[--m_made]);
    }

    // Null with an exception set.
    const BufferObject* of(LauncherObject* launcher, const Argument& argument, PyObject* object) {
        if (PyObject_TypeCheck(object, &BufferType)) [[likely]] return as_buffer(object);
        if (PyObject_CheckBuffer(object)) {
            if (const BufferObject* buffer = of_host_array(object)) return buffer;
        }
        PyObject* parts[] = {object, reinterpret_cast<PyObject*>(launcher), argument.name};
        PyObject* made = PyObject_Vectorcall(launcher->convert, parts, 3, nullptr);
        if (!made) return nullptr;
        m_object[m_made++] = made;
        if (PyObject_TypeCheck(made, &BufferType)) return as_buffer(made);
        raise_error("LaunchError", "kernel %U: %U is no buffer", launcher->name, argument.name);
        return nullptr;
    }

  private:
    // An array of the host without a Python object for it; null where the protocol cannot say what it
    // is (bf16, fp8, strides, other byte orders), which is no error.
    const BufferObject* of_host_array(PyObject* object) {
        Py_buffer& view = m_view[m_views];
        if (PyObject_GetBuffer(object, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)) {
            PyErr_Clear();
            return nullptr;
        }
        const uint8_t dtype = dtype_of_format(view.format, view.itemsize);
        if (!dtype || view.ndim > MAX_DIMENSIONS) {
            PyBuffer_Release(&view);
            return nullptr;
        }
        BufferObject& buffer = m_array[m_views++];
        buffer.address = reinterpret_cast<uint64_t>(view.buf);
        buffer.bytes = uint64_t(view.len);
        buffer.kind = DeviceKind::Cpu;
        buffer.dtype = dtype;
        buffer.dimensions = uint8_t(view.ndim);
        buffer.is_read_only = view.readonly != 0;
        buffer.number = 0;
        std::copy(view.shape, view.shape + view.ndim, buffer.shape);
        return &buffer;
    }

    Py_buffer m_view[MAX_ARGUMENTS];
    BufferObject m_array[MAX_ARGUMENTS];
    PyObject* m_object[MAX_ARGUMENTS];
    size_t m_views = 0, m_made = 0;
};

PyObject* launcher_call(PyObject* self, PyObject* const* args, size_t flagged, PyObject* names) {
    LauncherObject* launcher = as_launcher(self);
    const Plan& plan = *launcher->plan;
    const size_t count = plan.arguments.size();
    PyObject* given[MAX_ARGUMENTS];
    PyObject* stream = nullptr;
    if (!place(launcher, args, PyVectorcall_NARGS(flagged), names, given, &stream)) return nullptr;
    if (stream && stream != Py_None && plan.kind != DeviceKind::Cuda) [[unlikely]] {
        PyObject* device = device_name(plan.kind, plan.number);
        raise_error("LaunchError", "kernel %U: %S has no streams; leave stream= out", launcher->name, device);
        Py_XDECREF(device);
        return nullptr;
    }
    uint64_t slots[MAX_ARGUMENTS + 1];
    void* pointers[MAX_ARGUMENTS + 1];
    int64_t values[MAX_ARGUMENTS];
    for (size_t i = 0; i < count; ++i) {
        pointers[i] = &slots[i];
        const Argument& argument = plan.arguments[i];
        if (!argument.is_buffer && !read_scalar(launcher, argument, given[i], slots[i], values[i])) {
            return nullptr;
        }
    }
    Buffers held;
    const BufferObject* buffers[MAX_ARGUMENTS];
    for (size_t i = 0; i < count; ++i) {
        const Argument& argument = plan.arguments[i];
        buffers[i] = argument.is_buffer ? held.of(launcher, argument, given[i]) : nullptr;
        if (!argument.is_buffer) continue;
        if (!buffers[i] || !check_buffer(launcher, argument, buffers[i], values)) return nullptr;
        slots[i] = buffers[i]->address;
    }
    int64_t sizes[7];
    if (!check_overlap(launcher, buffers, count) || !evaluate_sizes(launcher, values, sizes)) {
        return nullptr;
    }
    slots[count] = plan.fault;
    pointers[count] = &slots[count];
    bool is_done = true;  // NULL checks everything and executes nothing
    if (plan.kind == DeviceKind::Cpu) is_done = launch_host(launcher, pointers, sizes);
    if (plan.kind == DeviceKind::Cuda) is_done = launch_cuda(launcher, pointers, sizes, stream);
    if (!is_done) return nullptr;
    Py_RETURN_NONE;
}

// ---------------------------------------------------------------------------------------- the object

bool read_expression(PyObject* code, uint32_t values, Expression& expression) {
    char* bytes = nullptr;
    Py_ssize_t length = 0;
    if (PyBytes_AsStringAndSize(code, &bytes, &length)) return false;
    std::string problem;
    expression = Expression(bytes, uint64_t(length), values, problem);
    if (problem.empty()) return true;
    raise_error("InternalError", "%s", problem.c_str());
    return false;
}

// ("x", True, dtype, access, align, (code, …)) or ("n", False, type, low, high)
bool read_argument(PyObject* row, uint32_t values, Argument& argument) {
    PyObject *name = nullptr, *shape = nullptr;
    int is_buffer = PyObject_IsTrue(PyTuple_GET_ITEM(row, 1));
    if (is_buffer) {
        int dtype = 0, access = 0;
        unsigned int align = 1;
        if (!PyArg_ParseTuple(row, "UpiiIO!", &name, &is_buffer, &dtype, &access, &align, &PyTuple_Type,
                              &shape)) return false;
        argument.dtype = uint8_t(dtype);
        argument.is_written = access & 2;
        argument.align = align;
        argument.shape.resize(size_t(PyTuple_GET_SIZE(shape)));
        for (size_t i = 0; i < argument.shape.size(); ++i) {
            if (!read_expression(PyTuple_GET_ITEM(shape, Py_ssize_t(i)), values, argument.shape[i])) return false;
        }
    } else {
        int type = 0;
        long long low = 0, high = 0;
        if (!PyArg_ParseTuple(row, "UpiLL", &name, &is_buffer, &type, &low, &high)) return false;
        argument.type = ScalarType(type);
        argument.low = low;
        argument.high = high;
    }
    argument.is_buffer = is_buffer != 0;
    argument.name = Py_NewRef(name);
    PyUnicode_InternInPlace(&argument.name);
    return true;
}

// Launcher(name, arguments, sizes, size_texts, limits, kind, number, function, context, fault, owner,
//          convert, dtypes). Expressions are over all arguments by position; those of buffers are never used.
PyObject* launcher_new(PyTypeObject* type, PyObject* args, PyObject* names) {
    static const char* keys[] = {"name", "arguments", "sizes", "size_texts", "limits", "kind", "number",
                                 "function", "context", "fault", "owner", "convert", "dtypes", nullptr};
    PyObject *name = nullptr, *arguments = nullptr, *sizes = nullptr, *texts = nullptr, *limits = nullptr;
    PyObject *owner = nullptr, *convert = nullptr, *dtypes = nullptr;
    int kind = 0, number = 0;
    unsigned long long function = 0, context = 0, fault = 0;
    if (!PyArg_ParseTupleAndKeywords(args, names, "UO!O!O!O!iiKKKOOO!", const_cast<char**>(keys), &name,
                                     &PyTuple_Type, &arguments, &PyTuple_Type, &sizes, &PyTuple_Type,
                                     &texts, &PyTuple_Type, &limits, &kind, &number, &function, &context, &fault, &owner,
                                     &convert, &PyTuple_Type, &dtypes)) {
        return nullptr;
    }
    const size_t count = size_t(PyTuple_GET_SIZE(arguments));
    if (count > MAX_ARGUMENTS || PyTuple_GET_SIZE(sizes) != 7 || PyTuple_GET_SIZE(texts) != 7 ||
        PyTuple_GET_SIZE(limits) != 8) {
        return raise_error("LaunchError", "kernel %U: a kernel has at most %zu arguments, got %zu", name,
                           MAX_ARGUMENTS, count);
    }
    auto plan = std::make_unique<Plan>();
    plan->arguments.resize(count);
    plan->kind = DeviceKind(kind);
    plan->number = number;
    plan->function = function;
    plan->context = context;
    plan->fault = fault;
    bool is_sound = true;
    for (size_t i = 0; is_sound && i < count; ++i) {
        is_sound = read_argument(PyTuple_GET_ITEM(arguments, Py_ssize_t(i)), uint32_t(count), plan->arguments[i]);
    }
    for (int i = 0; is_sound && i < 7; ++i) {
        is_sound = read_expression(PyTuple_GET_ITEM(sizes, i), uint32_t(count), plan->sizes[i]);
    }
    for (int i = 0; is_sound && i < 8; ++i) {
        plan->limits[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(limits, i));
        is_sound = !PyErr_Occurred();
    }
    LauncherObject* launcher = is_sound ? as_launcher(type->tp_alloc(type, 0)) : nullptr;
    if (!launcher) {
        for (Argument& argument : plan->arguments) Py_XDECREF(argument.name);
        return nullptr;
    }
    launcher->call = launcher_call;
    launcher->plan = plan.release();
    launcher->name = Py_NewRef(name);
    launcher->owner = Py_NewRef(owner);
    launcher->convert = Py_NewRef(convert);
    launcher->dtypes = Py_NewRef(dtypes);
    launcher->size_texts = Py_NewRef(texts);
    return reinterpret_cast<PyObject*>(launcher);
}

int launcher_traverse(PyObject* self, visitproc visit, void* arg) {
    LauncherObject* launcher = as_launcher(self);
    Py_VISIT(launcher->owner);
    Py_VISIT(launcher->convert);
    return 0;
}

int launcher_clear(PyObject* self) {
    LauncherObject* launcher = as_launcher(self);
    Py_CLEAR(launcher->owner);
    Py_CLEAR(launcher->convert);
    return 0;
}

void launcher_dealloc(PyObject* self) {
    LauncherObject* launcher = as_launcher(self);
    PyObject_GC_UnTrack(self);
    if (launcher->weakrefs) PyObject_ClearWeakRefs(self);
    launcher_clear(self);
    Py_CLEAR(launcher->name);
    Py_CLEAR(launcher->dtypes);
    Py_CLEAR(launcher->size_texts);
    for (Argument& argument : launcher->plan->arguments) Py_XDECREF(argument.name);
    delete launcher->plan;
    Py_TYPE(self)->tp_free(self);
}

PyObject* launcher_repr(PyObject* self) {
    LauncherObject* launcher = as_launcher(self);
    PyObject* device = device_name(launcher->plan->kind, launcher->plan->number);
    PyObject* text = device ? PyUnicode_FromFormat("<launch of %U on %U>", launcher->name, device) : nullptr;
    Py_XDECREF(device);
    return text;
}

PyObject* launcher_device(PyObject* self, void*) {
    const Plan& plan = *as_launcher(self)->plan;
    return device_name(plan.kind, plan.number);
}

PyObject* launcher_name(PyObject* self, void*) { return Py_NewRef(as_launcher(self)->name); }

PyGetSetDef launcher_fields[] = {
    {"name", launcher_name, nullptr, "Name of the kernel.", nullptr},
    {"device", launcher_device, nullptr, "Name of the device.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

int ready_launcher_type(PyObject* module) {
    LauncherType.tp_name = "brickline._core.Launcher";
    LauncherType.tp_doc = "One compiled kernel: call it with its arguments, by position or by name.";
    LauncherType.tp_basicsize = sizeof(LauncherObject);
    LauncherType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC;
    LauncherType.tp_vectorcall_offset = offsetof(LauncherObject, call);
    LauncherType.tp_call = PyVectorcall_Call;
    LauncherType.tp_new = launcher_new;
    LauncherType.tp_dealloc = launcher_dealloc;
    LauncherType.tp_traverse = launcher_traverse;
    LauncherType.tp_clear = launcher_clear;
    LauncherType.tp_repr = launcher_repr;
    LauncherType.tp_getset = launcher_fields;
    LauncherType.tp_weaklistoffset = offsetof(LauncherObject, weakrefs);
    if (PyType_Ready(&LauncherType)) return -1;
    return PyModule_AddObjectRef(module, "Launcher", reinterpret_cast<PyObject*>(&LauncherType));
}

}  // namespace brickline::hot
