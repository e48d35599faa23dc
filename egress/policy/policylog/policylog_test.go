package policylog_test

import (
	"fmt"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/doze-run/doze/egress/feed"
	"github.com/doze-run/doze/egress/policy/policylog"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var one = policylog.Policy{"ann", "one"}

func texts(lines []policylog.Line) string {
	var all []string
	for _, l := range lines {
		all = append(all, l.Text)
	}
	return strings.Join(all, " ")
}

func TestFilters(t *testing.T) {
	l := policylog.New()
	for _, level := range []policylog.Level{policylog.Debug, policylog.Info, policylog.Warn, policylog.Error} {
		l.Add(one, policylog.Line{Level: level, Text: string(level)})
	}
	l.Add(policylog.Policy{"ann", "two"}, policylog.Line{Level: policylog.Error, Text: "two"})
	l.Add(policylog.Policy{"bob", "one"}, policylog.Line{Level: policylog.Error, Text: "bob"})
	all := l.Lines(one, policylog.Filter{})
	for _, c := range []struct {
		filter policylog.Filter
		want   string
	}{
		{policylog.Filter{}, "debug info warn error"}, {policylog.Filter{Level: policylog.Debug}, "debug info warn error"}, {policylog.Filter{Level: policylog.Warn}, "warn error"},
		{policylog.Filter{After: all[1].Seq}, "warn error"}, {policylog.Filter{After: all[2].Seq, Level: policylog.Error}, "error"}, {policylog.Filter{After: all[3].Seq}, ""},
	} {
		if got := texts(l.Lines(one, c.filter)); got != c.want {
			t.Errorf("%+v: got %q, want %q", c.filter, got, c.want)
		}
	}
}

func TestTheLatestLinesAreStored(t *testing.T) {
	l := policylog.New()
	const maxLines = 1000
	for i := range 2*maxLines + 10 {
		l.Add(one, policylog.Line{Level: policylog.Info, Text: fmt.Sprint(i)})
	}
	lines := l.Lines(one, policylog.Filter{})
	if len(lines) != maxLines || lines[0].Text != fmt.Sprint(maxLines+10) || lines[maxLines-1].Seq-lines[0].Seq != maxLines-1 {
		t.Errorf("%d lines from %+v", len(lines), lines[0])
	}
}

func TestFollowersGetStoredAndNewLines(t *testing.T) {
	l := policylog.New()
	l.Add(one, policylog.Line{Level: policylog.Info, Text: "kept"})
	lines, stop := l.Follow(one, policylog.Filter{Level: policylog.Info})
	l.Add(one, policylog.Line{Level: policylog.Debug, Text: "other"})
	for i := range feed.Backlog + 4 {
		l.Add(one, policylog.Line{Level: policylog.Info, Text: fmt.Sprint(i)})
	}
	if got := (<-lines).Text; got != "kept" {
		t.Errorf("got %s", got)
	}
	l.Add(one, policylog.Line{Level: policylog.Info, Text: "last"})
	stop()
	stop()
	var last policylog.Line
	for last = range lines {
	}
	if last.Text != "last" || last.Dropped != 4 {
		t.Errorf("got %+v", last)
	}
}
