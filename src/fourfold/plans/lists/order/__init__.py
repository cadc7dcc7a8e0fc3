"""Whether the messages between stages meet where they carry no tags. A lowered plan enters; the grouped calls of each rank
leave, and a proof, or the rank, action and message at fault. Knows nothing of transports or seconds."""
