// Ranks that are processes (or threads) with a GPU each, connected by NCCL. Only in runtimes that were built for GPUs.
#pragma once

#include <memory>
#include <string>

#include "gradgen/communicator.h"

namespace gradgen {

/// `host` connects the same ranks for small messages: it carries NCCL's id, reports and errors. `library`: libnccl's
/// file or name. A collective that takes longer than `timeout` is aborted on this rank, and the others are told.
/// Collective. Throws CommError where NCCL is missing or cannot connect.
std::shared_ptr<Communicator> nccl_communicator(std::shared_ptr<Communicator> host, int device, Timeout timeout,
                                                const std::string& library);

}  // namespace gradgen
