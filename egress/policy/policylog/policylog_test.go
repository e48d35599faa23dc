package policylog

import (
	"fmt"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var one = Policy{"ann", "one"}

func texts(lines []Line) string {
	var all []string
	for _, l := range lines {
		all = append(all, l.Text)
	}
	return strings.Join(all, " ")
}

func TestFilters(t *testing.T) {
	var l Log
	for _, level := range levels {
		l.Add(one, Line{Level: level, Text: string(level)})
	}
	l.Add(Policy{"ann", "two"}, Line{Level: Error, Text: "two"})
	l.Add(Policy{"bob", "one"}, Line{Level: Error, Text: "bob"})
	all := l.Lines(one, Filter{})
	for _, c := range []struct {
		filter Filter
		want   string
	}{
		{Filter{}, "debug info warn error"}, {Filter{Level: Debug}, "debug info warn error"}, {Filter{Level: Warn}, "warn error"},
		{Filter{After: all[1].Seq}, "warn error"}, {Filter{After: all[2].Seq, Level: Error}, "error"}, {Filter{After: all[3].Seq}, ""},
	} {
		if got := texts(l.Lines(one, c.filter)); got != c.want {
			t.Errorf("%+v: got %q, want %q", c.filter, got, c.want)
		}
	}
}

func TestTheLatestLinesAreKept(t *testing.T) {
	var l Log
	for i := range 2*maxLines + 10 {
		l.Add(one, Line{Level: Info, Text: fmt.Sprint(i)})
	}
	lines := l.Lines(one, Filter{})
	if len(lines) != maxLines || lines[0].Text != fmt.Sprint(maxLines+10) || lines[maxLines-1].Seq-lines[0].Seq != maxLines-1 {
		t.Errorf("%d lines from %+v", len(lines), lines[0])
	}
}

func TestPoliciesShareWhatIsKeptOfAll(t *testing.T) {
	var l Log
	long := strings.Repeat("x", 1000)
	total := func() (n int) {
		for _, b := range l.books {
			n += b.bytes
		}
		return n
	}
	for p := range 2 * maxTotal / maxBytes {
		for range maxBytes / 1000 {
			l.Add(Policy{"ann", fmt.Sprint(p)}, Line{Level: Info, Text: long})
		}
	}
	if n := total(); n > maxTotal {
		t.Errorf("%d bytes", n)
	}
	if n := len(l.Lines(Policy{"ann", "0"}, Filter{})); n < maxBytes/2000/2 {
		t.Errorf("the first has %d lines", n)
	}
}

func TestFollowersGetWhatIsKeptAndWhatComes(t *testing.T) {
	var l Log
	l.Add(one, Line{Level: Info, Text: "kept"})
	lines, stop := l.Follow(one, Filter{Level: Info})
	l.Add(one, Line{Level: Debug, Text: "other"})
	for i := range followerBacklog + 4 {
		l.Add(one, Line{Level: Info, Text: fmt.Sprint(i)})
	}
	if got := (<-lines).Text; got != "kept" {
		t.Errorf("got %s", got)
	}
	l.Add(one, Line{Level: Info, Text: "last"})
	stop()
	stop()
	var last Line
	for last = range lines {
	}
	if last.Text != "last" || last.Dropped != 4 {
		t.Errorf("got %+v", last)
	}
}

func TestFollowersEnd(t *testing.T) {
	for name, end := range map[string]func(*Log){"forget": func(l *Log) { l.Forget(one) }, "close": (*Log).Close} {
		var l Log
		lines, stop := l.Follow(one, Filter{})
		end(&l)
		if _, ok := <-lines; ok {
			t.Errorf("%s: a line", name)
		}
		stop()
	}
	var l Log
	_, stop := l.Follow(one, Filter{})
	stop()
	if len(l.books) != 0 {
		t.Error("a follower leaves a book without lines")
	}
	l.Close()
	lines, stop := l.Follow(one, Filter{})
	defer stop()
	if _, ok := <-lines; ok {
		t.Error("a line after Close")
	}
}
