// The kernel of fingerprint_cuda.h, executed by fibers, against the plain engine of the host: every
// dtype, shapes that cut lines, blocks and stripes, strides, several teams, several tensors a launch.
#include "cuda_threads.h"

#include <cstdio>

#include "brickline/fingerprint_cuda.h"

namespace brickline::fingerprint {
uint4 memory[(TEAM_BYTES + 256 * THREAD_BYTES) / 16];
}

// What follows is host code again; platform.h has been read, so nothing asks any more.
#undef __CUDACC__
#include "fingerprint.h"
#include "native_test.h"

using namespace brickline;
using namespace brickline::fingerprint;
using namespace native_test;

namespace {

constexpr uint32_t PROCESSORS = 3;

struct Tensor {
    DType dtype;
    std::vector<int64_t> shape, strides;  // strides empty: contiguous
    std::vector<unsigned char> bytes;
    uint64_t offset = 0;                  // bytes before the first element
    FingerprintRow row = {};

    Tensor(DType type, std::vector<int64_t> sizes, bool is_special = false) : dtype(type), shape(std::move(sizes)) {
        uint64_t elements = 1;
        for (int64_t size : shape) elements *= uint64_t(size);
        fill(elements, is_special);
    }
    void fill(uint64_t elements, bool is_special) {
        const uint32_t size = element_bytes(uint32_t(dtype));
        Random random(elements * 16 + uint32_t(dtype));
        bytes.resize((elements + 4) * size + 64);
        for (unsigned char& byte : bytes) byte = (unsigned char)random.bits();
        for (uint64_t k = 0; k < bytes.size() / size; ++k) {
            unsigned char* const at = bytes.data() + k * size;
            // Exponents near one, now and then zero, and where asked for whatever the bits say.
            const bool is_plain = !is_special || !random.one_in(20);
            if (dtype == DType::F64 && is_plain) at[7] = (at[7] & 0x80) | 0x3f;
            if (dtype == DType::F32 && is_plain) at[3] = (at[3] & 0x80) | 0x3f;
            if ((dtype == DType::F16 || dtype == DType::BF16) && is_plain) at[1] = (at[1] & 0x80) | 0x3f;
            if (dtype == DType::F8E4M3 && is_plain) at[0] &= 0xb7;
            if (dtype == DType::F8E5M2 && is_plain) at[0] &= 0xbf;
            if (dtype == DType::Bool) at[0] &= 1;
            if (is_special && random.one_in(9)) std::memset(at, 0, size);
        }
    }
    TensorView view() {
        if (strides.empty()) {
            strides.resize(shape.size());
            int64_t stride = 1;
            for (size_t k = shape.size(); k-- > 0; stride *= shape[k]) strides[k] = stride;
        }
        const uintptr_t base = (reinterpret_cast<uintptr_t>(bytes.data()) + 15) / 16 * 16;
        return {reinterpret_cast<const void*>(base + offset), dtype, int(shape.size()), shape.data(), strides.data()};
    }
    std::string name() const {
        std::string text = "dtype " + std::to_string(uint32_t(dtype)) + " [";
        for (int64_t size : shape) text += std::to_string(size) + " ";
        return text + "]";
    }
};

template <uint32_t COUNT>
void run_team(const Batch<COUNT>& batch, char* scratch, DType dtype) {
    switch (dtype) {
        case DType::F64: return take_batch<double>(batch, scratch);
        case DType::F32: return take_batch<float>(batch, scratch);
        case DType::F16: return take_batch<f16>(batch, scratch);
        case DType::BF16: return take_batch<bf16>(batch, scratch);
        case DType::F8E4M3: return take_batch<f8e4m3>(batch, scratch);
        case DType::F8E5M2: return take_batch<f8e5m2>(batch, scratch);
        case DType::I64: return take_batch<int64_t>(batch, scratch);
        case DType::I32: return take_batch<int32_t>(batch, scratch);
        case DType::I16: return take_batch<int16_t>(batch, scratch);
        case DType::I8: return take_batch<int8_t>(batch, scratch);
        case DType::U64: return take_batch<uint64_t>(batch, scratch);
        case DType::U32: return take_batch<uint32_t>(batch, scratch);
        case DType::U16: return take_batch<uint16_t>(batch, scratch);
        case DType::U8: return take_batch<uint8_t>(batch, scratch);
        case DType::Bool: return take_batch<Truth>(batch, scratch);
    }
}

void launch(std::vector<Tensor*> tensors) {
    std::vector<DeviceTensor> given;
    for (Tensor* tensor : tensors) given.push_back({tensor->view(), reinterpret_cast<uint64_t>(&tensor->row)});
    const DeviceLaunch shared = share_out(given.data(), int(given.size()), PROCESSORS);
    static std::vector<uint64_t> scratch((COUNTER_BYTES + (2 * PROCESSORS + JOBS) * 8 * PARTIAL_WORDS) / 8);
    char* const place = reinterpret_cast<char*>(scratch.data());
    const DType dtype = tensors[0]->dtype;
    Batch<1> one;
    one.job[0] = shared.batch.job[0];
    for (uint32_t team = 0; team < shared.teams; ++team) {
        cuda_threads::run_block(team, shared.threads, [&] {
            if (tensors.size() == 1) run_team(one, place, dtype);
            else run_team(shared.batch, place, dtype);
        });
    }
}

void check_alike(Tensor& tensor) {
    int count = 0;
    const FingerprintEngine& plain = *fingerprint_engines(count)[0];
    FingerprintRow row;
    fingerprint_with(plain, tensor.view(), row);
    const FingerprintRow& found = tensor.row;
    const std::string name = tensor.name() + ": ";
    check(found.hash[0] == row.hash[0] && found.hash[1] == row.hash[1], name + "hash");
    double apart = 0;
    for (uint32_t k = 0; k < SKETCH_BUCKETS; ++k) apart = std::fmax(apart, std::fabs(found.sketch[k] - row.sketch[k]));
    check(apart <= 1e-12 * row.l2, name + "sketch");
    const auto are_close = [&](float a, float b) {  // also where both are beyond the largest float
        return a == b || std::fabs(a - b) <= 2e-7 * std::fabs(b) + 1e-12 * row.l1;
    };
    bool is_alike = true;
    for (uint32_t k = 0; k < STRIPES; ++k) {
        is_alike &= are_close(found.rows[k], row.rows[k]) && are_close(found.columns[k], row.columns[k]);
    }
    check(is_alike, name + "stripes");
    check(std::fabs(found.l1 - row.l1) <= 1e-12 * row.l1 && std::fabs(found.l2 - row.l2) <= 1e-12 * row.l2 &&
              std::fabs(found.total - row.total) <= 1e-12 * row.l1, name + "norms");
    check(found.minimum == row.minimum && found.maximum == row.maximum && found.absmax == row.absmax, name + "extremes");
    check(found.nan_count == row.nan_count && found.inf_count == row.inf_count && found.first_nan == row.first_nan &&
              found.first_inf == row.first_inf && found.nonfinite_hash == row.nonfinite_hash, name + "not finite");
    check(found.zeros == row.zeros && found.subnormals == row.subnormals && found.saturated == row.saturated, name + "counts");
    check(found.elements == row.elements && found.dtype == row.dtype && found.dimensions == row.dimensions &&
              !std::memcmp(found.shape, row.shape, sizeof row.shape) && found.version == row.version, name + "facts");
}

void check_one(Tensor tensor) {
    launch({&tensor});
    check_alike(tensor);
}

}  // namespace

int main() {
    watchdog(280);
    for (uint32_t code = 1; code <= 15; ++code) {
        const DType dtype = DType(code);
        const bool has_wild_sums = dtype == DType::F64;
        for (auto shape : std::vector<std::vector<int64_t>>{{}, {7}, {33, 100}, {5, 1024}, {17, 67}, {0, 4}, {4096}}) {
            check_one(Tensor(dtype, shape, !has_wild_sums));
        }
    }
    for (DType dtype : {DType::F32, DType::BF16, DType::U8, DType::F64}) {
        check_one(Tensor(dtype, {40, 4096}));         // stripes of 128 columns
        check_one(Tensor(dtype, {3, 11008}));         // stripes that cut lines
        check_one(Tensor(dtype, {700, 100}));         // many rows in a block
        check_one(Tensor(dtype, {5000, 1}));
        check_one(Tensor(dtype, {1500, 3}));
        check_one(Tensor(dtype, {100000}));           // several blocks a warp
        Tensor turned(dtype, {60, 50, 7});
        turned.shape = {7, 60, 50}, turned.strides = {1, 350, 7};
        check_one(std::move(turned));
        Tensor spread(dtype, {100, 40});
        spread.shape = {30, 3, 40}, spread.strides = {80, 0, 1};
        check_one(std::move(spread));
        Tensor shifted(dtype, {3000});
        shifted.offset = element_bytes(uint32_t(dtype));
        check_one(std::move(shifted));
    }
    check_one(Tensor(DType::U8, {2, (1 << 20) + 8}));  // wider than NARROW, and large teams
    std::vector<Tensor> several;
    for (int k = 0; k < 7; ++k) several.emplace_back(DType::F32, std::vector<int64_t>{11 * k, 300}, k % 2 == 0);
    for (int repeat = 0; repeat < 2; ++repeat) {
        std::vector<Tensor*> pointers;
        for (Tensor& tensor : several) pointers.push_back(&tensor);
        launch(pointers);
        for (Tensor& tensor : several) check_alike(tensor);
    }
    return finish();
}
