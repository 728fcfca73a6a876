#include "mega_queue_proof.h"

namespace brickline {
namespace {

std::string words_of(const MegaVerdict& verdict, std::span<const uint32_t> orders) {
    const auto name = [&](uint32_t task) {
        return task < orders.size() ? "submission " + std::to_string(orders[task]) : "nobody that is there";
    };
    const char* why = "cannot be run in the order that was decided";
    switch (verdict.breach) {
        case MegaBreach::UnknownProducer:
        case MegaBreach::SkippedProducer:
        case MegaBreach::SilentProducer: why = "waits for what never finishes"; break;
        case MegaBreach::Race: why = "touches the same bytes, and nothing keeps it in order after"; break;
        case MegaBreach::WrongAlias: why = "does not compute what was computed by"; break;
        case MegaBreach::WrongRegion: why = "may not be in a region with"; break;
        default: break;
    }
    return "MK" + std::to_string(uint32_t(verdict.breach)) + ": " + name(verdict.task) + " " + why + " " + name(verdict.other);
}

}  // namespace

std::string MegaQueueProof::prove(const MegaBatch& batch, uint32_t first, std::span<const MegaDecision> decisions) {
    const uint64_t* values = batch.arguments.data();
    uint32_t access = 0;
    for (uint32_t k = 0; k < batch.jobs.size(); ++k) {
        const MegaJob& job = batch.jobs[k];
        const uint32_t words = m_ops[job.op].arguments;
        m_open[first + k] = {job.op, job.grid[0] * job.grid[1] * job.grid[2], {values, values + words},
                             {batch.accesses.begin() + access, batch.accesses.begin() + batch.access_end[k]}, decisions[k]};
        values += words;
        access = batch.access_end[k];
    }

    std::vector<uint32_t> op, blocks, flags, param_begin = {0}, access_begin = {0}, entry_begin = {0}, entries, region, orders;
    std::vector<uint64_t> params;
    std::vector<MegaAccess> accesses;
    std::vector<int32_t> alias;
    std::map<uint32_t, uint32_t> task_of;  // by order, of those that are open
    for (const auto& [order, open] : m_open) {
        const uint32_t task = uint32_t(orders.size()), own = m_ops[open.op].flags;
        task_of[order] = task;
        orders.push_back(order);
        op.push_back(open.op);
        blocks.push_back(open.blocks);
        flags.push_back((own & MEGA_PURE ? uint32_t{MEGA_TASK_PURE} : 0) | (own & MEGA_IN_ORDER ? uint32_t{MEGA_TASK_ATOMIC} : 0));
        params.insert(params.end(), open.params.begin(), open.params.end());
        param_begin.push_back(uint32_t(params.size()));
        accesses.insert(accesses.end(), open.accesses.begin(), open.accesses.end());
        access_begin.push_back(uint32_t(accesses.size()));
        // What has finished is over, and keeps nobody waiting.
        for (const uint32_t waited : open.decision.waits) {
            if (const auto found = task_of.find(waited); found != task_of.end()) entries.push_back(found->second);
            else if (waited >= order) entries.push_back(MEGA_SET - 1);  // nobody
        }
        entry_begin.push_back(uint32_t(entries.size()));
        const auto before = task_of.find(open.decision.follows);
        region.push_back(before == task_of.end() ? task : region[before->second]);
        const auto same = task_of.find(open.decision.alias);
        alias.push_back(same == task_of.end() ? -1 : int32_t(same->second));
    }
    const uint64_t no_sets[] = {0};
    MegaSchedule schedule;
    schedule.tasks = {op, blocks, flags, param_begin, params, access_begin, accesses};
    schedule.alias = alias;
    schedule.entry_begin = entry_begin;
    schedule.entries = entries;
    schedule.set_begin = no_sets;
    schedule.region = region;
    const MegaVerdict verdict = mega_validate(schedule);
    // One that is not run is over when the other one is, which is what others wait for.
    for (uint32_t k = 0; k < batch.jobs.size(); ++k) {
        if (decisions[k].alias != MEGA_NOTHING) m_open.erase(first + k);
    }
    return verdict.breach == MegaBreach::None ? "" : words_of(verdict, orders);
}

void MegaQueueProof::finish(uint32_t order) {
    m_over.assign(1, order);
    while (!m_over.empty()) {
        const auto found = m_open.find(m_over.back());
        m_over.pop_back();
        if (found == m_open.end()) continue;
        const MegaDecision& decision = found->second.decision;
        m_over.insert(m_over.end(), decision.waits.begin(), decision.waits.end());
        if (decision.follows != MEGA_NOTHING) m_over.push_back(decision.follows);
        m_open.erase(found);
    }
}

}  // namespace brickline
