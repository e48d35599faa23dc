package policylog

import (
	"fmt"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/doze-run/doze/egress/feed"
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
	l := New()
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

func TestTheLatestLinesAreStored(t *testing.T) {
	l := New()
	for i := range 2*maxLines + 10 {
		l.Add(one, Line{Level: Info, Text: fmt.Sprint(i)})
	}
	lines := l.Lines(one, Filter{})
	if len(lines) != maxLines || lines[0].Text != fmt.Sprint(maxLines+10) || lines[maxLines-1].Seq-lines[0].Seq != maxLines-1 {
		t.Errorf("%d lines from %+v", len(lines), lines[0])
	}
}

func TestFollowersGetStoredAndNewLines(t *testing.T) {
	l := New()
	l.Add(one, Line{Level: Info, Text: "kept"})
	lines, stop := l.Follow(one, Filter{Level: Info})
	l.Add(one, Line{Level: Debug, Text: "other"})
	for i := range feed.Backlog + 4 {
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
