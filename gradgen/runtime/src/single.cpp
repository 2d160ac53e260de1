// One rank: what it offers is what it gets.
#include <cstring>

#include "gradgen/communicator.h"
#include "gradgen/error.h"

namespace gradgen {

namespace {

class SingleCommunicator final : public Communicator {
  public:
    SingleCommunicator() : Communicator(0, 1) {}

    std::string_view transport() const override { return "single"; }

    Ticket post(const Offer& offer) override {
        check("post");
        offers_.push_back({next_, offer.data});
        return next_++;
    }
    bool ready(Ticket) override {
        check("ready");
        return true;
    }
    std::vector<ReduceSource> sources(Ticket ticket) override {
        check("sources");
        for (const Item& item : offers_)
            if (item.ticket == ticket) return {ReduceSource{item.data, false}};
        throw StateError("communicator: sources of an exchange that was released or never posted");
    }
    void release(Ticket ticket, const void*) override {
        std::erase_if(offers_, [&](const Item& item) { return item.ticket == ticket; });
    }
    bool drained(Ticket) override {
        check("drained");
        return true;
    }
    void wait_drained(Ticket) override { check("wait_drained"); }

    bool shares_memory() const override { return true; }
    void barrier() override { check("barrier"); }
    std::vector<std::string> gather_objects(const std::string& mine) override {
        check("gather_objects");
        return {mine};
    }
    void all_gather(void* out, const void* in, std::size_t bytes) override {
        check("all_gather");
        if (bytes > 0 && out != in) std::memmove(out, in, bytes);
    }
    void all_to_all(void* out, const void* in, std::size_t bytes) override { all_gather(out, in, bytes); }

    void abort(const std::string& why) override {
        if (!failed_) why_ = why;
        failed_ = true;
    }
    void reset() override {
        if (closed_) check("reset");
        failed_ = false;
        offers_.clear();
    }
    void close() override { closed_ = true; }

  private:
    void check(const char* call) const {
        if (closed_) throw StateError(std::string("communicator: ") + call + " after close()");
        if (failed_) throw CommError(why_);
    }

    struct Item {
        Ticket ticket;
        const void* data;
    };
    std::vector<Item> offers_;
    Ticket next_ = 0;
    bool failed_ = false, closed_ = false;
    std::string why_;
};

}  // namespace

std::shared_ptr<Communicator> single_communicator() { return std::make_shared<SingleCommunicator>(); }

}  // namespace gradgen
