"""Where to cut: exact solvers over tables of stage costs, and the brute force that tests compare them with.

chain_dp       stages in a given place: the smallest maximum, sum, step (Σ + repeats · max) or end of a schedule
device_dp      the same where the device, or the number of replicas, of a stage is open too
replicas       the smallest longest stage on any number of devices, replicas chosen
balance        the smallest longest stage of a chain whose work adds up, at any size
recomputation  the least seconds of recomputing with which every range of layers fits
thresholds     the search of Σ + repeats · max, for any solver of Σ
bands          tables by length of range, for passes that look at short ranges only
graph_dp       stages of a DAG, over all its ideals: the smallest longest one
ideals         the sets of nodes that a DAG's first stages can hold
traffic        what crosses the boundaries of a DAG's stages
ilp            device_dp's questions by integer programming: a certificate, and side constraints
brute          every split
"""
