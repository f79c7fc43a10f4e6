// Memory on machines with several NUMA nodes. A core reads the memory of its own node faster than that of
// another. Linux puts a page on the node of the thread that writes it first.
#pragma once
#include "base/layout.h"
#include "base/memory.h"
#include "base/threads.h"

namespace engine {

// A copy of the first `panels` panels of a matrix. Each thread of the pool writes the panels that are its share
// of a matmul. Its threads must be bound to their nodes.
Block copy_by_node(ThreadPool& pool, const Matrix& matrix, int panels);

// Spreads the pages of a block evenly over the nodes. Pages that were written before stay where they are. Does
// nothing if `nodes` is empty, or if the operating system does not allow it.
void interleave(const Block& block, const std::vector<int>& nodes);

}  // namespace engine
