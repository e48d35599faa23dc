package feed_test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/doze-run/doze/egress/feed"
	"github.com/doze-run/doze/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type entry struct {
	Seq     uint64
	Time    time.Time
	Dropped uint64
	Text    string
	Size    int
}

func newFeed(entries, bytes, total int) *feed.Feed[string, entry] {
	return feed.New[string](feed.Config[entry]{
		Entries: entries, Bytes: bytes, TotalBytes: total,
		Size:   func(e *entry) int { return e.Size },
		Header: func(e *entry) feed.Header { return feed.Header{Seq: &e.Seq, Time: &e.Time, Dropped: &e.Dropped} },
	})
}

func all(*entry) bool { return true }

func named(text string) func(*entry) bool { return func(e *entry) bool { return e.Text == text } }

func texts(entries []entry) (list []string) {
	for _, e := range entries {
		list = append(list, e.Text)
	}
	return list
}

func TestTheLatestEntriesAreStored(t *testing.T) {
	f := newFeed(20, 1<<20, 1<<20)
	var want []string
	for i := range 55 {
		f.Add("s", &entry{Text: fmt.Sprint(i)})
		want = append(want, fmt.Sprint(i))
		want = want[max(0, len(want)-20):]
		testkit.Diff(t, "the entries", texts(f.Entries("s", all)), want)
	}
	testkit.Diff(t, "the matching entries", texts(f.Entries("s", named("54"))), []string{"54"})
	if got := f.Entries("other", all); got != nil {
		t.Errorf("another source has %v", got)
	}
}

func TestSourcesShareTheTotalEqually(t *testing.T) {
	const bytes, total, size = 32 << 10, 64 << 10, 100
	f := newFeed(1000, bytes, total)
	stored := func(source int) int { return size * len(f.Entries(fmt.Sprint(source), all)) }
	for n := range 8 {
		for range 500 {
			f.Add(fmt.Sprint(n), &entry{Size: size})
		}
		for source := range n + 1 {
			if share := min(bytes, total/(n+1)); stored(source) > share || stored(source) < share/2 {
				t.Errorf("of %d sources one stores %d bytes, want up to %d", n+1, stored(source), share)
			}
		}
	}
	for n := range 7 {
		f.Forget(fmt.Sprint(n))
	}
	for range 500 {
		f.Add("7", &entry{Size: size})
	}
	if got := stored(7); got < bytes-size {
		t.Errorf("the last source stores %d bytes, want %d", got, bytes)
	}
}

func TestFollowersReceiveStoredAndNewEntries(t *testing.T) {
	f := newFeed(100, 1<<20, 1<<20)
	f.Add("s", &entry{Text: "a"})
	f.Add("s", &entry{Text: "b"})
	entries, stop := f.Follow("s", func(e *entry) bool { return e.Text != "b" && e.Text != "c" })
	f.Add("s", &entry{Text: "c"})
	f.Add("s", &entry{Text: "d"})
	f.Add("other", &entry{Text: "e"})
	stop()
	stop()
	f.Add("s", &entry{Text: "f"})
	var got []entry
	for e := range entries {
		got = append(got, e)
	}
	testkit.Diff(t, "the entries", texts(got), []string{"a", "d"})
}

func TestSlowFollowersReceiveTheNumberOfDroppedEntries(t *testing.T) {
	f := newFeed(1000, 1<<20, 1<<20)
	entries, stop := f.Follow("s", all)
	for range feed.Backlog + 10 {
		f.Add("s", &entry{})
	}
	<-entries
	f.Add("s", &entry{Dropped: 99})
	stop()
	var last entry
	for last = range entries {
	}
	if last.Dropped != 10 {
		t.Errorf("%d dropped", last.Dropped)
	}
	for _, e := range f.Entries("s", all) {
		if e.Dropped != 0 {
			t.Errorf("the stored entry has %d dropped", e.Dropped)
		}
	}
}

func TestFollowersEndWithTheirSourceAndTheFeed(t *testing.T) {
	for name, end := range map[string]func(*feed.Feed[string, entry]){
		"forget": func(f *feed.Feed[string, entry]) { f.Forget("s") },
		"close":  (*feed.Feed[string, entry]).Close,
	} {
		t.Run(name, func(t *testing.T) {
			f := newFeed(10, 100, 100)
			entries, stop := f.Follow("s", all)
			end(f)
			if _, ok := <-entries; ok {
				t.Error("an entry")
			}
			stop()
		})
	}
	f := newFeed(10, 100, 100)
	f.Close()
	f.Add("s", &entry{Text: "a"})
	entries, stop := f.Follow("s", all)
	defer stop()
	if e := <-entries; e.Text != "a" {
		t.Errorf("after Close got %+v", e)
	}
	if _, ok := <-entries; ok {
		t.Error("a second entry after Close")
	}
}

// A source without entries would have a share of the total.
func TestFollowersLeaveNoSource(t *testing.T) {
	f := newFeed(1000, 100, 100)
	f.Add("s", &entry{Size: 100})
	_, first := f.Follow("other", all)
	_, second := f.Follow("other", all)
	first()
	second()
	f.Add("s", &entry{Size: 100, Text: "whole share"})
	testkit.Diff(t, "the entries", texts(f.Entries("s", all)), []string{"whole share"})
}

func TestNoEntryIsLostWhileFollowersComeAndGo(t *testing.T) {
	f := newFeed(1000, 1<<20, 1<<20)
	var latest atomic.Int64 // source
	var done atomic.Bool
	var followers sync.WaitGroup
	for range 2 {
		followers.Go(func() {
			for !done.Load() {
				_, stop := f.Follow(fmt.Sprint(latest.Load()), all)
				stop()
			}
		})
	}
	for i := range 3000 {
		latest.Store(int64(i))
		f.Add(fmt.Sprint(i), &entry{})
		if got := len(f.Entries(fmt.Sprint(i), all)); got != 1 {
			t.Errorf("%d entries, want the first one", got)
		}
		f.Forget(fmt.Sprint(i))
	}
	done.Store(true)
	followers.Wait()
}

func TestSeqContinuesAfterARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var last uint64
		for range 2 {
			f := newFeed(1000, 1<<20, 1<<20)
			for range 3 {
				f.Add("s", &entry{})
			}
			entries := f.Entries("s", all)
			if entries[0].Seq <= last || entries[2].Seq != entries[0].Seq+2 {
				t.Errorf("%d to %d after %d", entries[0].Seq, entries[2].Seq, last)
			}
			last = entries[2].Seq
			time.Sleep(time.Millisecond)
		}
	})
}
