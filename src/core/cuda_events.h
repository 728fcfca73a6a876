// CUDA's driver as an EventDriver. Creates and destroys events alone; contexts, streams and memory
// belong to others.
#pragma once

#include <memory>
#include <string>

#include "device_spans.h"

namespace brickline {

// Null with a reason when there is no driver, no such device, or no current context on it.
std::unique_ptr<EventDriver> open_cuda_events(int device, std::string& problem);

// What the driver says of itself, for `doctor`: empty when there is none.
struct CudaDriverFacts {
    bool present = false;
    int version = 0;
    int devices = 0;
    std::string problem;
};
CudaDriverFacts cuda_driver_facts();

}  // namespace brickline
