// The same attention on a CPU with AMX, for many queries: sixteen of them lie side by side in a register, so that
// softmax needs no sums across one. What is summed, and in which order, is the same: so are the bits of finite numbers.
#pragma once

#include "attention.h"

// After begin_columns.
void attend_columns(const AttentionUnit *unit, const AttentionShape *shape, AttentionScratch *scratch);
