// Host fingerprints of the engines that this machine can execute, against each other and against the
// definition element by element: dtypes, sizes that end anywhere, strides, memory at its exact bounds.
#include <cmath>
#include <cstring>

#include "fingerprint.h"
#include "native_test.h"

using namespace brickline;
using namespace brickline::fingerprint;
using namespace native_test;

namespace {

struct Given {
    DType dtype;
    std::vector<int64_t> shape, strides;
    std::vector<unsigned char> bytes;  // exactly the elements, so that a byte too many is seen

    TensorView view() const {
        return {bytes.data(), dtype, int(shape.size()), shape.data(), strides.data()};
    }
};

std::vector<int64_t> dense(const std::vector<int64_t>& shape) {
    std::vector<int64_t> strides(shape.size());
    int64_t stride = 1;
    for (size_t k = shape.size(); k-- > 0; stride *= shape[k]) strides[k] = stride;
    return strides;
}

Given made(DType dtype, std::vector<int64_t> shape, Random& random) {
    uint64_t elements = 1;
    for (int64_t size : shape) elements *= uint64_t(size);
    Given given = {dtype, shape, dense(shape), {}};
    given.bytes.resize(elements * element_bytes(uint32_t(dtype)));
    for (unsigned char& byte : given.bytes) byte = (unsigned char)random.bits();
    if (dtype == DType::F64) {  // whose sums would else be infinite
        for (uint64_t k = 7; k < given.bytes.size(); k += 8) given.bytes[k] = (given.bytes[k] & 0x80) | 0x3f;
    }
    return given;
}

FingerprintRow taken(const FingerprintEngine& engine, const TensorView& view) {
    FingerprintRow row;
    fingerprint_with(engine, view, row);
    return row;
}

void check_alike(const FingerprintRow& a, const FingerprintRow& b, const std::string& where) {
    check(a.hash[0] == b.hash[0] && a.hash[1] == b.hash[1], where + ": hash");
    bool is_alike = std::fabs(a.l1 - b.l1) <= 1e-12 * b.l1 && std::fabs(a.l2 - b.l2) <= 1e-12 * b.l2;
    for (uint32_t k = 0; k < SKETCH_BUCKETS; ++k) is_alike &= std::fabs(a.sketch[k] - b.sketch[k]) <= 1e-12 * b.l2;
    check(is_alike || !(b.l2 < 1e300), where + ": sums");
    check(a.minimum == b.minimum && a.maximum == b.maximum, where + ": extremes");
    check(a.nan_count == b.nan_count && a.inf_count == b.inf_count && a.first_nan == b.first_nan &&
              a.first_inf == b.first_inf && a.nonfinite_hash == b.nonfinite_hash && a.zeros == b.zeros &&
              a.subnormals == b.subnormals && a.saturated == b.saturated,
          where + ": counts");
}

// The sketch of floats, straight from the definition.
void check_definition(const FingerprintRow& row, const std::vector<float>& x) {
    double sketch[SKETCH_BUCKETS] = {}, total = 0, squares = 0;
    for (uint64_t i = 0; i < x.size(); ++i) {
        const uint32_t line = uint32_t(i / LINE % LINES), place = place_of(line, uint32_t(i % LINE));
        const bool is_less = is_turned(i / BLOCK, line, place);
        sketch[place ^ turn_of(i / BLOCK)] += is_less ? -double(x[i]) : double(x[i]);
        total += x[i], squares += double(x[i]) * x[i];
    }
    bool is_alike = std::fabs(row.total - total) <= 1e-9 && std::fabs(row.l2 - std::sqrt(squares)) <= 1e-9;
    for (uint32_t k = 0; k < SKETCH_BUCKETS; ++k) is_alike &= std::fabs(row.sketch[k] - sketch[k]) <= 1e-9;
    check(is_alike, "the definition");
}

}  // namespace

int main() {
    watchdog(240);
    Random random;
    int count = 0;
    const FingerprintEngine* const* engines = fingerprint_engines(count);
    const FingerprintEngine& plain = *engines[count - 1];
    check(std::string(plain.name) == "plain", "the last engine is the plain one");
    for (uint32_t code = 1; code <= 15; ++code) {
        for (auto shape : std::vector<std::vector<int64_t>>{
                 {}, {1}, {3}, {64}, {1023}, {1024}, {1025}, {3, 700}, {40, 128}, {2, 3, 67}, {0, 5}, {70, 1}}) {
            const Given given = made(DType(code), shape, random);
            const FingerprintRow expected = taken(plain, given.view());
            for (int k = 0; k + 1 < count; ++k) {
                check_alike(taken(*engines[k], given.view()), expected,
                            std::string(engines[k]->name) + " dtype " + std::to_string(code));
            }
        }
    }
    for (int k = 0; k < count; ++k) {
        std::vector<float> x(5000);
        for (float& each : x) each = float(int(random.below(2001)) - 1000) / 64;
        const int64_t shape[] = {5000}, stride[] = {1};
        check_definition(taken(*engines[k], {x.data(), DType::F32, 1, shape, stride}), x);

        // A transposed, stepped and reversed view against its copy in logical order.
        const Given base = made(DType::I32, {50, 41, 33}, random);
        const int32_t* const values = reinterpret_cast<const int32_t*>(base.bytes.data());
        const Given view = {DType::I32, {17, 50, 41}, {-2, 41 * 33, 33}, {}};
        std::vector<int32_t> copy;
        for (int64_t a = 0; a < 17; ++a)
            for (int64_t b = 0; b < 50; ++b)
                for (int64_t c = 0; c < 41; ++c) copy.push_back(values[32 - 2 * a + b * 41 * 33 + c * 33]);
        const std::vector<int64_t> contiguous = dense(view.shape);
        check_alike(taken(*engines[k], {values + 32, DType::I32, 3, view.shape.data(), view.strides.data()}),
                    taken(plain, {copy.data(), DType::I32, 3, view.shape.data(), contiguous.data()}),
                    "a strided view");
    }
    return finish();
}
