"""The fleet: which engines exist, on which hosts, in which state, at which version; and who keeps it so.

`engine` is the record of one, `membership` the list that others follow, `supervisor` what finds the dead and brings
them back. How engines are started and asked is behind `port`: `slime.cluster` has the implementation on Ray, `external`
that of servers which somebody else started and `fitting` finds to fit.
"""
