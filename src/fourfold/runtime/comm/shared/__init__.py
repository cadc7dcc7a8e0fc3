"""One transport: memory that the ranks of one host share. Rows for small gathers, sums of gradients, stored tensors.

Enters: tensors of ranks on one host. Leaves: their sums and parts. Knows nothing of groups that span hosts.

A rank writes its own rows and counters only, and every rank reads all of them. Nothing is locked: what keeps a reader from a
row that is being written is the order of the steps below, to whose numbers comments in the code refer. They need stores that
become visible in program order, as on x86.

`memory.SharedRows`: one counter and two rows per rank; ``n`` counts the gathers and barriers of the group.

    gather n                                            barrier n
    (1) rank r writes rows[n % 2][r]
    (2) rank r sets counters[r] = n                     (2)
    (3) rank r waits until min(counters) >= n           (3)
    (4) rank r reads rows[n % 2][0..p-1]

    Safe: rank r writes rows[n % 2][r] again in gather n + 2, after its (3) of n + 1. Then all ranks have done (2) of n + 1,
    and so (4) of n.

`sums.SharedSum`: one row per rank, as long as the gradients together, cut into p slices.

             row 0            row 1           ...
    (5)      rank 0 writes    rank 1 writes             its own gradients
    ------------------------------ barrier ------------------------------
    (6)      rank k adds slice k of all other rows to slice k of row k
    ------------------------------ barrier ------------------------------
    (7)      rank r copies slice k of row k into slice k of row r, for all k other than r
    ------------------------------ barrier ------------------------------
             row r is rank r's alone until (5) of the next step

    Safe: in (6) nobody but rank k touches slice k of row k; in (7) nobody writes it, and nobody reads the rest of row k.

`tensors.SharedTensors` and `runtime.zero.zero3_shared`: shards of divided weights (ZeRO-3), and a ring for their gradients.

    (8)  rank r moves its shards into row r             once; then a barrier
    ------------------------------ barrier ------------------------------   the list's first action of a step
    (9)  any rank reads boxes of any row                forwards and backwards gather weights; nobody writes shards
    (10) rank r reserves a place for gradient g: where it overlaps the place of an earlier gradient e,
         it waits until min(consumed) >= e
    (11) rank r writes its gradient into areas[r]       the same place in every rank's area
    (12) rank r sets published[r] = g
    (13) once min(published) >= g, rank r adds its own part of g from areas[0..p-1] to its shard's gradient
    (14) rank r sets consumed[r] = g
    (15) after the last backward rank r waits until min(published) is the last g, and does (13) and (14) up to it
    ------------------------------ barrier ------------------------------   nobody reads weights or the ring any more
    (16) rank r starts again at the beginning of its area, without (10)
         the optimizer of rank r writes row r           until the first barrier of the next step

    Ranks drift apart in (9) to (14) by as much as the ring holds; (13) adds in rank order, whichever rank came first.

`runtime.zero.zero1`: two areas per rank; ``n`` counts the rounds in which updated slices are gathered.

    (17) rank r writes its chunk into areas[n % 2][r]
    ------------------------------ barrier ------------------------------
    (18) rank r reads areas[n % 2][0..p-1]

    Safe for the reason given under (4): the barrier of round n + 1 lies between (18) of n and (17) of n + 2.
"""
