// MegaQueueProof: what a queue's publisher decides, proved batch by batch by mega_validation.h: that whoever
// touches the same bytes is kept in order, also by what is still open of earlier batches, that nobody waits
// for something that is not there, and that what is joined or left out may be. Takes the publisher's word
// for nothing but what has finished, and that it had waited as was decided.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "mega_queue_types.h"
#include "mega_validation.h"

namespace brickline {

// What was decided of one job; others are named by their order.
struct MegaDecision {
    std::vector<uint32_t> waits;
    uint32_t follows = MEGA_NOTHING;  // the one that it is joined to
    uint32_t alias = MEGA_NOTHING;    // the one that computes its values
};

class MegaQueueProof {
  public:
    explicit MegaQueueProof(const std::vector<MegaQueueOp>& ops) : m_ops(ops) {}

    // "" or what is wrong, in words. Jobs have the orders from `first` on, and are open from here on.
    std::string prove(const MegaBatch& batch, uint32_t first, std::span<const MegaDecision> decisions);
    // It is over, and with it all that it waited for, which may be told of later: a worker releases others
    // before it hands in what it has finished itself.
    void finish(uint32_t order);
    void forget() { m_open.clear(); }

  private:
    struct Open {
        uint32_t op, blocks;
        std::vector<uint64_t> params;
        std::vector<MegaAccess> accesses;
        MegaDecision decision;
    };

    const std::vector<MegaQueueOp> m_ops;
    std::map<uint32_t, Open> m_open;  // by order
    std::vector<uint32_t> m_over;     // room for finish()
};

}  // namespace brickline
