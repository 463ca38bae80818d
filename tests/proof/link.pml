/* The protocol of the links between hosts (native/link/link.hpp): READY, ORDER and BEAT records, the bytes of entries,
   departures, and one fault, in every order in which messages can come.

   Each host has one rank, which submits its operations in any order and leaves when they are over. The fault, if any:
   a host fails its world (as when a rank died), falls silent, or leaves without its last operation. Messages of one
   sender and receiver come in order, records and bytes apart; the records of one step travel together. Time, which ends
   patience, passes when nothing else can happen.

   Checked in every execution: none is stuck; hosts publish the same entries in the same order; what is complete
   somewhere was announced by all; what is complete on the host that fails first becomes complete on every other one.
   -DSLICED: each host sums a slice, and waits for the results of the others.
   -DLAZY: ranks reduce at any time, in place of at once; executions for the replay, which cannot tell them when, do not.
   -DALIKE: an operation ends alike on all hosts. There are executions where it does not, as there must be: a host cannot
   know that another one has failed when it completes an operation.

   link.py checks it, and makes the executions that tests/native/test_link_traces.cpp replays. */
#define HOSTS 3
#define OPS 2
#define ALL 7
#define CONDUCTOR 0
#define NONE 9

mtype = { READY, ORDER, BEAT, FAILURE, SILENCE, DEPARTURE }
#define AT(a, b) ((a) * HOSTS + (b))
#define OF(h, op) ((h) * OPS + (op))

/* From one host to another: records with a bit that changes from step to step; a READY or ORDER has an operation, a BEAT whether
   the world has failed, whether all ranks have left, entries that have arrived, and READY records by host. */
chan mail[9] = [8] of { mtype, byte, byte, byte, byte, byte, byte, byte }
byte sent_p[9], got_p[9], sent_r[9], got_r[9]; /* messages with partial sums, with results: sent and delivered */
bit toggle[HOSTS]; /* of the step that sent last */

bit announced[6], skips[6];
byte ready[6];      /* by host and operation: the hosts whose announcement is known, a set */
byte n_ready[9];    /* by host and sender */
byte orders[6], n_orders[HOSTS], n_published[HOSTS];
byte n_sent[HOSTS], n_summed[HOSTS], n_told[HOSTS];
byte done[HOSTS];   /* operations that are complete, a set */
bit failed[HOSTS], sent_end[HOSTS], left[HOSTS], sent_left[HOSTS], over[HOSTS];
byte peers_left[HOSTS], peers_failed[HOSTS];
bit has_abort[HOSTS], impatient[HOSTS];
byte abort_arrived[HOSTS], abort_ready[9];

byte common[OPS], n_common; /* the entries of all hosts */
byte silent = NONE, first_failed = NONE, first_done;
mtype fault; /* 0: none */
/* Of one event. */
hidden byte h, p, op, x, y, a, r0, r1, r2;
hidden mtype kind;
hidden byte number, has_sent;

#define LIVES(q) (!over[q] && q != silent)

inline send_all(what, x1, x2, x3, x4, x5, x6) {
  if
  :: sent_end[h] -> skip
  :: else ->
    toggle[h] = (has_sent -> toggle[h] : 1 - toggle[h]);
    has_sent = 1;
    p = 0;
    do
    :: p == HOSTS -> break
    :: p < HOSTS && p != h && LIVES(p) -> mail[AT(h, p)]!what, x1, x2, x3, x4, x5, x6, toggle[h]; p++
    :: else -> p++
    od
  fi
}

inline fail() { /* Alarm::raise: what the link has told by now is complete on the rank */
  if
  :: !failed[h] ->
    failed[h] = 1;
    if
    :: first_failed == NONE -> first_failed = h; first_done = done[h]
    :: else
    fi
  :: else
  fi
}

inline publish(it) {
  if
  :: n_published[h] == n_common -> common[n_common] = it; n_common++
  :: else -> assert(common[n_published[h]] == it)
  fi;
  n_published[h]++
}

#define TO_OTHERS(counter, many) /* messages */ \
  p = 0; \
  do \
  :: p == HOSTS -> break \
  :: p < HOSTS && p != h && LIVES(p) -> counter[AT(h, p)] = many; p++ \
  :: else -> p++ \
  od

#define HAS(counter, e) \
  (h == 0 || counter[AT(0, h)] > e) && (h == 1 || counter[AT(1, h)] > e) && (h == 2 || counter[AT(2, h)] > e)
#define LATE (n_told[h] < abort_arrived[h] || n_ready[AT(h, 0)] < abort_ready[AT(h, 0)] || \
              n_ready[AT(h, 1)] < abort_ready[AT(h, 1)] || n_ready[AT(h, 2)] < abort_ready[AT(h, 2)])
#define IS_EMPTY (n_told[h] == n_published[h])
/* Records that come after its failure change nothing for the others, but when its link ends; and without slices, bytes
   do not, either. With slices, a host sums what it has for the others. */
#ifdef SLICED
#define IS_OVER_NOW (!failed[h] && IS_EMPTY && (peers_left[h] | 1 << h) == ALL)
#define NEEDS_PARTIALS(q) true
#define RETURN TO_OTHERS(sent_r, n_summed[h])
#define HAS_RESULTS HAS(got_r, n_told[h])
#else
#define IS_OVER_NOW (failed[h] || (IS_EMPTY && (peers_left[h] | 1 << h) == ALL))
#define NEEDS_PARTIALS(q) !sent_end[q]
#define RETURN skip
#define HAS_RESULTS true
#endif

inline forget(it) { /* what nobody looks at any more, for fewer states */
  p = 0;
  do
  :: p == HOSTS -> break
  :: p < HOSTS && len(mail[AT(p, it)]) > 0 -> mail[AT(p, it)]?kind, x, y, a, r0, r1, r2, number
  :: p < HOSTS && len(mail[AT(p, it)]) == 0 ->
    got_p[AT(p, it)] = 0; sent_p[AT(p, it)] = 0; got_r[AT(p, it)] = 0; sent_r[AT(p, it)] = 0;
    n_ready[AT(it, p)] = 0; abort_ready[AT(it, p)] = 0;
    p++
  od;
  ready[OF(it, 0)] = 0; ready[OF(it, 1)] = 0; orders[OF(it, 0)] = 0; orders[OF(it, 1)] = 0; n_orders[it] = 0;
  n_published[it] = 0; n_sent[it] = 0; n_summed[it] = 0; n_told[it] = 0; toggle[it] = 0;
  peers_left[it] = 0; peers_failed[it] = 0; has_abort[it] = 0; impatient[it] = 0; abort_arrived[it] = 0
}

#ifdef LAZY
#define AT_ONCE false
#else
#define AT_ONCE true
#endif
inline reduce() { /* the rank does, and its link sends it */
  n_sent[h]++;
  TO_OTHERS(sent_p, n_sent[h])
}

inline step() { /* Link::step after the records */
  do
  :: !failed[h] && h != CONDUCTOR && n_published[h] < n_orders[h] && ready[OF(h, orders[OF(h, n_published[h])])] == ALL ->
    publish(orders[OF(h, n_published[h])])
  :: AT_ONCE && !failed[h] && n_sent[h] < n_published[h] -> reduce()
  :: n_summed[h] < n_sent[h] && HAS(got_p, n_summed[h]) ->
    n_summed[h]++;
    RETURN
  :: !sent_end[h] && n_told[h] < n_summed[h] && HAS_RESULTS ->
    op = common[n_told[h]];
    n_told[h]++;
    assert(announced[OF(0, op)] && announced[OF(1, op)] && announced[OF(2, op)]);
    if
    :: !failed[h] -> done[h] = done[h] | 1 << op
    :: else
    fi
  :: has_abort[h] && !failed[h] && (!LATE || impatient[h]) -> fail()
  :: !failed[h] && ((announced[OF(h, 0)] && (peers_left[h] & ~ready[OF(h, 0)])) ||
                    (announced[OF(h, 1)] && (peers_left[h] & ~ready[OF(h, 1)]))) -> fail()
  :: else -> break
  od;
  if
  :: !sent_end[h] && (failed[h] || left[h]) ->
    send_all(BEAT, failed[h], left[h], n_told[h], n_ready[AT(h, 0)], n_ready[AT(h, 1)], n_ready[AT(h, 2)]);
    sent_end[h] = 1
  :: else
  fi;
  if
  :: sent_end[h] && IS_OVER_NOW -> over[h] = 1; forget(h)
  :: else
  fi
}

inline on_ready(from, it) {
  n_ready[AT(h, from)]++;
  ready[OF(h, it)] = ready[OF(h, it)] | 1 << from;
  if
  :: h == CONDUCTOR && ready[OF(h, it)] == ALL && !failed[h] -> publish(it); send_all(ORDER, it, 0, 0, 0, 0, 0)
  :: else
  fi
}

inline deliver(from) { /* a message: all records of one step */
  mail[AT(from, h)]?kind, x, y, a, r0, r1, r2, number;
  do
  :: true ->
    if
    :: kind == READY -> on_ready(from, x)
    :: kind == ORDER -> orders[OF(h, n_orders[h])] = x; n_orders[h]++
    :: kind == BEAT ->
      if
      :: y -> peers_left[h] = peers_left[h] | 1 << from
      :: else
      fi;
      if
      :: x && !(peers_failed[h] >> from & 1) ->
        peers_failed[h] = peers_failed[h] | 1 << from;
        if
        :: !has_abort[h] ->
          has_abort[h] = 1; abort_arrived[h] = a;
          abort_ready[AT(h, 0)] = r0; abort_ready[AT(h, 1)] = r1; abort_ready[AT(h, 2)] = r2
        :: else
        fi
      :: else
      fi
    fi;
    if
    :: mail[AT(from, h)]?[kind, x, y, a, r0, r1, r2, eval(number)] ->
      mail[AT(from, h)]?kind, x, y, a, r0, r1, r2, number
    :: else -> break
    fi
  od
}

#define IS_OVER(q) (announced[OF(q, 0)] && (skips[OF(q, 1)] || announced[OF(q, 1)]) && \
                    done[q] == (skips[OF(q, 1)] -> 1 : 3))

#ifdef ONLY /* this fault */
#define MAY(what) (!fault && what == ONLY)
#else
#define MAY(what) !fault
#endif
#define EVENTS(q) \
  :: LIVES(q) && !failed[q] && !announced[OF(q, 0)] -> d_step { h = q; has_sent = 0; op = 0; announce() } \
  :: LIVES(q) && !failed[q] && !announced[OF(q, 1)] && !skips[OF(q, 1)] -> d_step { h = q; has_sent = 0; op = 1; announce() } \
  :: LIVES(q) && !failed[q] && !left[q] && IS_OVER(q) -> \
    d_step { h = q; has_sent = 0; printf("E leave %d\n", h); left[h] = 1; step() } \
  :: MAY(FAILURE) && LIVES(q) && !failed[q] && !left[q] -> \
    d_step { fault = FAILURE; h = q; has_sent = 0; printf("E fail %d\n", h); fail(); step() } \
  :: MAY(SILENCE) && LIVES(q) && !left[q] -> d_step { fault = SILENCE; silent = q; forget(q); printf("E silence %d\n", q) } \
  :: MAY(DEPARTURE) && LIVES(q) && !announced[OF(q, 1)] -> d_step { fault = DEPARTURE; skips[OF(q, 1)] = 1 } \
  :: LIVES(q) && silent != NONE && !failed[q] && !(peers_left[q] >> silent & 1) -> \
    d_step { h = q; has_sent = 0; printf("E notice %d %d\n", h, silent); fail(); step() } \
  :: LIVES(q) && !failed[q] && n_sent[q] < n_published[q] -> d_step { h = q; has_sent = 0; reduce(); step() } \
  FROM(q, 0) FROM(q, 1) FROM(q, 2)

#define FROM(q, f) \
  :: LIVES(q) && !failed[q] && len(mail[AT(f, q)]) > 0 -> d_step { h = q; has_sent = 0; printf("E mail %d %d\n", f, h); deliver(f); step() } \
  :: LIVES(q) && NEEDS_PARTIALS(q) && got_p[AT(f, q)] < sent_p[AT(f, q)] -> \
    d_step { h = q; has_sent = 0; printf("E partial %d %d\n", f, h); got_p[AT(f, h)]++; step() } \
  :: LIVES(q) && !sent_end[q] && got_r[AT(f, q)] < sent_r[AT(f, q)] -> \
    d_step { h = q; has_sent = 0; printf("E result %d %d\n", f, h); got_r[AT(f, h)]++; step() }

inline announce() {
  printf("E announce %d %d\n", h, op);
  announced[OF(h, op)] = 1;
  send_all(READY, op, 0, 0, 0, 0, 0);
  on_ready(h, op);
  step()
}

inline pass_time() { /* Abort::patience, after_failure_ */
  h = 0;
  has_sent = 0;
  do
  :: h == HOSTS -> break
  :: h < HOSTS && LIVES(h) && has_abort[h] && !failed[h] -> printf("E impatient %d\n", h); impatient[h] = 1; step(); break
  :: h < HOSTS && LIVES(h) && failed[h] -> printf("E over %d\n", h); over[h] = 1; forget(h); break
  :: else -> h++
  od;
  assert(h < HOSTS) /* else it is stuck */
}

active proctype link() {
  do
  EVENTS(0)
  EVENTS(1)
  EVENTS(2)
  :: !LIVES(0) && !LIVES(1) && !LIVES(2) -> break
  :: else -> d_step { pass_time() }
  od;
  skip;
  d_step {
    h = 0;
    do
    :: h == HOSTS -> break
    :: h < HOSTS && h != silent ->
      printf("E end %d %d %d\n", h, done[h], failed[h]);
      assert(failed[h] || done[h] == (skips[OF(h, 1)] -> 1 : 3)); /* each operation has ended */
      assert(fault != FAILURE || (done[h] & first_done) == first_done);
#ifdef ALIKE
      assert(fault != FAILURE || done[h] == done[first_failed]);
#endif
      h++
    :: else -> h++
    od
  }
}
