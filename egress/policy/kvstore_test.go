package policy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/testkit"
)

// documents is a store in memory whose operations can fail.
type documents struct {
	mu      sync.Mutex
	values  map[string][]byte
	fail    error
	written chan struct{} // receives a value after each write, if not nil
}

func (d *documents) change(f func()) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fail != nil {
		return d.fail
	}
	f()
	if d.written != nil {
		d.written <- struct{}{}
	}
	return nil
}

func (d *documents) PutDocument(_ context.Context, kind, name string, value []byte) error {
	return d.change(func() { d.values[kind+" "+name] = bytes.Clone(value) })
}

func (d *documents) DeleteDocument(_ context.Context, kind, name string) error {
	return d.change(func() { delete(d.values, kind+" "+name) })
}

func (d *documents) Documents(_ context.Context, kind string, yield func(string, []byte) error) error {
	d.mu.Lock()
	all := maps.Clone(d.values)
	d.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if rest, ok := strings.CutPrefix(name, kind+" "); ok {
			if err := yield(rest, all[name]); err != nil {
				return err
			}
		}
	}
	return nil
}

func newDocuments() *documents { return &documents{values: map[string][]byte{}} }

// openKV returns a kv as after a restart.
func openKV(t *testing.T, d *documents, now time.Time) *kv {
	t.Helper()
	k := &kv{persistence: persistence{documents: d, log: slog.New(slog.DiscardHandler)}}
	if err := k.load(t.Context(), now); err != nil {
		t.Fatal(err)
	}
	return k
}

func contents(k *kv, name string, now time.Time) map[string]string {
	all := map[string]string{}
	k.use(name, now, func(s *space) {
		for key := range s.entries {
			if v, ok := s.get(key, now); ok {
				all[key] = string(v)
			}
		}
	})
	return all
}

func TestStoredValuesSurviveARestart(t *testing.T) {
	now, d := time.Now(), newDocuments()
	k := openKV(t, d, now)
	name, other := spaceName("budget", "node/operator"), spaceName("budget", "ann")
	want := map[string]string{}
	k.use(name, now, func(s *space) {
		for i := range 300 {
			key := fmt.Sprintf("\x00\xff%d", i)
			want[key] = strings.Repeat("v", i)
			if err := s.set(key, []byte(want[key]), time.Hour, now); err != nil {
				t.Fatal(err)
			}
		}
		_, _ = s.add("count", 7, 0, now)
		_ = s.set("ends", []byte("soon"), time.Minute, now)
	})
	k.use(other, now, func(s *space) { _ = s.set("a", []byte("1"), 0, now) })
	if err := k.write(t.Context(), now, true); err != nil {
		t.Fatal(err)
	}
	want["count"] = "\x07\x00\x00\x00\x00\x00\x00\x00"

	later := now.Add(30 * time.Minute)
	k = openKV(t, d, later)
	if got := contents(k, name, later); !maps.Equal(got, want) {
		t.Errorf("got %d values, want %d", len(got), len(want))
	}
	if got := contents(k, other, later); len(got) != 1 || got["a"] != "1" {
		t.Errorf("got %v", got)
	}
	var fresh, loaded int
	openKV(t, d, now).use(name, now, func(s *space) { loaded = s.size })
	for key, value := range want {
		fresh += len(key) + len(value)
	}
	if fresh += len("endssoon"); loaded != fresh {
		t.Errorf("%d bytes were loaded, of %d", loaded, fresh)
	}

	// Expired values are removed from the disk, too.
	end := now.Add(2 * time.Hour)
	k = openKV(t, d, end)
	k.trim(end)
	if err := k.write(t.Context(), end, true); err != nil {
		t.Fatal(err)
	}
	for name, value := range d.values {
		if strings.Contains(name, "operator") && !bytes.Contains(value, []byte("count")) {
			t.Errorf("%q is left", name)
		}
	}
}

func TestOnlyChangedPagesAreWrittenAtABoundedRate(t *testing.T) {
	now, d := time.Now(), newDocuments()
	k := openKV(t, d, now)
	name := spaceName("p", "ann")
	fill := func() {
		k.use(name, now, func(s *space) {
			for i := range 200 {
				_ = s.set(fmt.Sprint(i), make([]byte, maxValue), 0, now)
			}
		})
	}
	fill()
	if err := k.write(t.Context(), now, false); err != nil || len(d.values) != pages {
		t.Fatalf("%d documents, %v", len(d.values), err)
	}
	clear(d.values)
	k.use(name, now, func(s *space) { _ = s.set("1", nil, 0, now) })
	now = now.Add(time.Second)
	if _ = k.write(t.Context(), now, false); len(d.values) != 0 {
		t.Error("800 KiB are written each second")
	}
	now = now.Add(time.Minute)
	if _ = k.write(t.Context(), now, false); len(d.values) != 1 {
		t.Errorf("%d documents were written for one value", len(d.values))
	}
	now = now.Add(time.Minute)
	clear(d.values)
	if _ = k.write(t.Context(), now, true); len(d.values) != 0 {
		t.Error("unchanged values were written")
	}
}

func TestFailedWritesAreRepeated(t *testing.T) {
	now, d := time.Now(), newDocuments()
	k := openKV(t, d, now)
	name := spaceName("p", "ann")
	k.use(name, now, func(s *space) { _ = s.set("a", []byte("1"), 0, now) })
	full := errors.New("the disk is full")
	d.fail = full
	if err := k.write(t.Context(), now, false); !errors.Is(err, full) {
		t.Errorf("got %v", err)
	}
	if err := k.write(t.Context(), now.Add(time.Second), false); err != nil {
		t.Errorf("it is tried again immediately: %v", err)
	}
	d.fail = nil
	if err := k.write(t.Context(), now.Add(2*writeAgain), false); err != nil {
		t.Error(err)
	}
	if got := contents(openKV(t, d, now), name, now); got["a"] != "1" {
		t.Errorf("got %v", got)
	}
}

func TestEraseDeletesStoredValues(t *testing.T) {
	now, d := time.Now(), newDocuments()
	k := openKV(t, d, now)
	one, two := spaceName("one", "ann"), spaceName("two", "ann")
	for _, name := range []string{one, two} {
		k.use(name, now, func(s *space) { _ = s.set("a", []byte("1"), 0, now) })
	}
	if err := k.write(t.Context(), now, true); err != nil {
		t.Fatal(err)
	}
	d.fail = errors.New("the disk is full")
	if err := k.erase(t.Context(), one); !errors.Is(err, d.fail) || contents(k, one, now)["a"] != "1" {
		t.Errorf("got %v", err)
	}
	d.fail = nil
	if err := k.erase(t.Context(), one); err != nil {
		t.Error(err)
	}
	if err := k.write(t.Context(), now, true); err != nil {
		t.Error(err)
	}
	k = openKV(t, d, now)
	if a, b := contents(k, one, now), contents(k, two, now); len(a) != 0 || len(b) != 1 {
		t.Errorf("left are %v and %v", a, b)
	}
}

func TestUnreadableValuesAreIgnoredAndRetained(t *testing.T) {
	now, d := time.Now(), newDocuments()
	good := appendEntry(nil, "a", entry{value: []byte("1")})
	for name, value := range map[string][]byte{"p/0/ann": good, "p/1/ann": {9, 9}, "p/2/ann": nil, "p/3/ann": good[:3], "nobody's": good} {
		d.values[valuesKind+" "+name] = value
	}
	k := openKV(t, d, now)
	if got := contents(k, spaceName("p", "ann"), now); len(got) != 1 || len(d.values) != 5 {
		t.Errorf("got %v of %d", got, len(d.values))
	}
}

// The writer wakes only to write. It does not wake while nothing changes.
func TestWriterWakesOnlyToWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDocuments()
		k := &kv{persistence: persistence{documents: d, log: slog.New(slog.DiscardHandler), changed: make(chan struct{}, 1)}}
		var wakeUps atomic.Int64
		stop, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			k.writer(stop, func(ctx context.Context, now time.Time, all bool) error {
				wakeUps.Add(1)
				return k.write(ctx, now, all)
			})
		}()
		one, two := spaceName("p", "ann"), spaceName("p", "bob")
		set := func(name, key string) {
			k.use(name, time.Now(), func(s *space) { _ = s.set(key, []byte("1"), 0, time.Now()) })
		}
		// after advances the fake clock by d, and compares the number of wake-ups with want.
		after := func(d time.Duration, what string, want int64) {
			t.Helper()
			time.Sleep(d)
			synctest.Wait()
			if got := wakeUps.Swap(0); got != want {
				t.Errorf("%s: %d wake-ups, want %d", what, got, want)
			}
		}
		stored := func(name, key string) {
			t.Helper()
			if contents(openKV(t, d, time.Now()), name, time.Now())[key] != "1" {
				t.Errorf("%s is not stored", key)
			}
		}
		fail := func(err error) {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.fail = err
		}
		after(time.Hour, "nothing was ever stored", 0)
		for i := range 100 { // of two owners
			set(one, fmt.Sprint(i))
			set(two, fmt.Sprint(i))
		}
		after(writeAfter, "200 values together", 1)
		stored(one, "99")
		stored(two, "99")
		after(time.Hour, "nothing has changed since", 0)

		set(one, "a")
		after(writeAfter/2, "a change waits for others", 0)
		set(one, "b")
		after(writeAfter/2, "both are written", 1)
		stored(one, "b")

		// A failed write does not block others, and is repeated.
		fail(errors.New("the disk is full"))
		set(one, "c")
		after(writeAfter, "the disk is full", 1)
		fail(nil)
		set(two, "d")
		after(writeAfter, "another one's change", 1)
		stored(two, "d")
		after(writeAgain-writeAfter, "the second attempt", 1)
		stored(one, "c")
		after(time.Hour, "nothing is left to write", 0)
		close(stop)
		<-ended
	})
}

func FuzzDecodeEntries(f *testing.F) {
	f.Add(appendEntry(appendEntry(nil, "a", entry{value: []byte("1")}), "b", entry{expires: time.UnixMilli(1e12)}))
	f.Fuzz(func(t *testing.T, b []byte) {
		entries, err := decodeEntries(b)
		if err != nil {
			return
		}
		var again []byte
		for key, e := range entries {
			if again = appendEntry(again, key, e); len(key) > maxKey || len(e.value) > maxValue {
				t.Errorf("a key of %d bytes with %d", len(key), len(e.value))
			}
		}
		if len(entries) > 0 {
			if same, err := decodeEntries(again); err != nil || len(same) != len(entries) {
				t.Errorf("got %v, %v", same, err)
			}
		}
	})
}

// A host writes values within a second or so, before it is closed.
func TestAHostWritesWhatPoliciesStore(t *testing.T) {
	d := newDocuments()
	d.written = make(chan struct{}, 100)
	h := newHost(t, func(c *Config) { c.Documents = d })
	p := scripted(t, h, "request kv-set a 1 0")
	if _, x := exchange(p, request("GET", "/"), nil); x.Cut || x.Denied != nil {
		t.Fatalf("%+v, %v", x.Denied, x.Cut)
	}
	<-d.written
	if got := contents(openKV(t, d, time.Now()), spaceName("script", ""), time.Now()); got["a"] != "1" {
		t.Errorf("got %v", got)
	}
}

// An exchange may outlive its policy. A later policy of the same name must not find the
// values that such an exchange stores.
func TestAnExchangeThatOutlivesItsPolicyStoresNothing(t *testing.T) {
	h := newHost(t, func(c *Config) { c.Documents = newDocuments() })
	m := compile(t, h, "script", guest(t, script))
	var lines []string
	m.Lines = func(l policylog.Line) { lines = append(lines, l.Text) }
	p := configure(t, m, commands(t, "request kv-set a 1 0", "request log before", "response kv-set a 2 0", "response kv-get a", "response log after"))
	_, x := exchange(p, request("GET", "/"), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := h.Forget(r.Context(), "script", ""); err != nil {
			t.Error(err)
		}
	}))
	if x.Cut || x.Denied != nil {
		t.Fatalf("%+v, %v", x.Denied, x.Cut)
	}
	if got := contents(&h.kv, spaceName("script", ""), time.Now()); len(got) != 0 {
		t.Errorf("stored are %v", got)
	}
	testkit.Diff(t, "the lines", lines, []string{"before"})
	if _, x := exchange(scripted(t, h, "request kv-set a 3 0"), request("GET", "/"), nil); x.Denied != nil {
		t.Fatal(x.Denied)
	}
	if got := contents(&h.kv, spaceName("script", ""), time.Now()); got["a"] != "3" {
		t.Errorf("a later policy has stored %v", got)
	}
}

func TestSizesOfForgottenValuesAreSubtractedOnce(t *testing.T) {
	k, now := &kv{}, time.Now()
	name := spaceName("policy", "owner")
	s := k.space(name, now)
	if err := s.set("key", []byte("value"), time.Second, now); err != nil {
		t.Fatal(err)
	}
	k.forget(name)
	s.expire(now.Add(time.Minute)) // as trim does for a space that it found before
	if left := k.totals["owner"].Load(); left != 0 || s.size != 0 {
		t.Errorf("%d bytes count for the owner, %d for the space", left, s.size)
	}
}
