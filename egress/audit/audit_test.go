package audit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/doze-run/doze/loglimit"
)

// newLog returns a Log of sandboxes without names.
func newLog(log *slog.Logger) *Log { return New(log, func(string) string { return "" }) }

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func hosts(entries []Entry) string {
	var all []string
	for _, e := range entries {
		all = append(all, e.Host)
	}
	return strings.Join(all, " ")
}

func TestEntriesAreJSONWithoutWhatIsEmpty(t *testing.T) {
	l := newLog(slog.New(slog.DiscardHandler))
	l.Record(Entry{Sandbox: "s1", Kind: DNS, Verdict: Deny, Host: "a.example"})
	l.Record(Entry{
		Sandbox: "s1", Flow: "f", Kind: Request, Host: "b.example", Address: netip.MustParseAddr("192.0.2.1"), Port: 443,
		Method: "GET", Path: "/user", Rule: "node/x", Policies: []Policy{{"bearer", "sha256:1"}}, Verdict: Allow,
		Secrets: []string{"token"}, Notes: []string{"seen"}, Status: 200, BytesOut: 1, BytesIn: 2, Duration: Took(1500 * time.Microsecond),
	})
	entries := l.Entries("s1", Filter{})
	if entries[1].Seq != entries[0].Seq+1 || time.Since(entries[0].Time) > time.Minute {
		t.Errorf("seq %d and %d, at %s", entries[0].Seq, entries[1].Seq, entries[0].Time)
	}
	for i, want := range []string{
		`{"seq":1,"time":"0001-01-01T00:00:00Z","sandbox":"s1","kind":"dns","host":"a.example","verdict":"deny"}`,
		`{"seq":1,"time":"0001-01-01T00:00:00Z","sandbox":"s1","flow":"f","kind":"request","host":"b.example","address":"192.0.2.1","port":443,` +
			`"method":"GET","path":"/user","rule":"node/x","policies":[{"name":"bearer","digest":"sha256:1"}],"verdict":"allow",` +
			`"secrets":["token"],"notes":["seen"],"status":200,"bytes_out":1,"bytes_in":2,"duration_ms":1.5}`,
	} {
		entries[i].Seq, entries[i].Time = 1, time.Time{}
		if got, _ := json.Marshal(entries[i]); string(got) != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

func TestTextsAreBoundedAndPrintable(t *testing.T) {
	long := strings.Repeat("é", 5000)
	e := Entry{
		Flow: long, Host: long, Method: long, Rule: long, Reason: long,
		Path:    "/a\n{\"forged\":1}\x1b[2J\xff?token=hidden",
		Secrets: make([]string, 100), Notes: []string{long},
	}
	for range 100 {
		e.Policies = append(e.Policies, Policy{long, long})
	}
	e.bound()
	if want := "/a\uFFFD{\"forged\":1}\uFFFD[2J\uFFFD"; e.Path != want {
		t.Errorf("path %q, want %q", e.Path, want)
	}
	for _, s := range []string{e.Flow, e.Host, e.Method, e.Rule, e.Reason, e.Notes[0], e.Policies[0].Name, e.Policies[0].Digest} {
		if len(s) > 1000 || s == "" || !utf8.ValidString(s) {
			t.Errorf("%d bytes: %.20q", len(s), s)
		}
	}
	if len(e.Policies) != maxList || len(e.Secrets) != maxList {
		t.Errorf("%d policies, %d secrets", len(e.Policies), len(e.Secrets))
	}
	if n := e.size(); n > 64<<10 {
		t.Errorf("an entry of %d bytes", n)
	}
}

func TestFilters(t *testing.T) {
	l := newLog(slog.New(slog.DiscardHandler))
	for _, e := range []Entry{
		{Kind: DNS, Verdict: Deny, Host: "a.example.com"},
		{Kind: Request, Verdict: Allow, Host: "example.com"},
		{Kind: Request, Verdict: Deny, Host: "b.example.com"},
		{Kind: Connection, Verdict: Allow, Host: "notexample.com"},
	} {
		e.Sandbox = "s"
		l.Record(e)
	}
	third := l.Entries("s", Filter{})[2].Seq
	for _, tc := range []struct {
		filter Filter
		want   string
	}{
		{Filter{}, "a.example.com example.com b.example.com notexample.com"},
		{Filter{Kind: Request}, "example.com b.example.com"},
		{Filter{Verdict: Deny}, "a.example.com b.example.com"},
		{Filter{Host: "example.com"}, "example.com"},
		{Filter{Host: "*.example.com"}, "a.example.com b.example.com"},
		{Filter{After: third}, "notexample.com"},
	} {
		if got := hosts(l.Entries("s", tc.filter)); got != tc.want {
			t.Errorf("%+v: %s, want %s", tc.filter, got, tc.want)
		}
	}
	if got := l.Entries("another", Filter{}); got != nil {
		t.Errorf("another sandbox has %v", got)
	}
}

func TestFollowersReceiveMatchingEntries(t *testing.T) {
	l := newLog(slog.New(slog.DiscardHandler))
	l.Record(Entry{Sandbox: "s", Host: "a", Verdict: Deny})
	entries, stop := l.Follow("s", Filter{Verdict: Deny})
	l.Record(Entry{Sandbox: "s", Host: "b", Verdict: Allow})
	l.Record(Entry{Sandbox: "s", Host: "c", Verdict: Deny})
	l.Forget("s")
	defer stop()
	var got []Entry
	for e := range entries {
		got = append(got, e)
	}
	if hosts(got) != "a c" {
		t.Errorf("got %s", hosts(got))
	}
}

func TestStoredEntriesAreBoundedInSize(t *testing.T) {
	l := newLog(slog.New(slog.DiscardHandler))
	for range 2 * maxEntries {
		l.Record(Entry{Sandbox: "s", Path: strings.Repeat("x", maxPath)})
	}
	bytes := 0
	for _, e := range l.Entries("s", Filter{}) {
		bytes += e.size()
	}
	if bytes > maxBytes || bytes < maxBytes-2*maxPath {
		t.Errorf("%d bytes, want up to %d", bytes, maxBytes)
	}
}

func TestLinesAreBoundedAndRefusalsApart(t *testing.T) {
	var out bytes.Buffer
	l := newLog(slog.New(slog.NewJSONHandler(&out, nil)))
	l.newLimit = func() *loglimit.Limit { return loglimit.New(1e-9, 3) }
	for range 5 {
		l.Record(Entry{Sandbox: "s", Kind: Request, Verdict: Allow})
	}
	l.Record(Entry{Sandbox: "s", Kind: DNS, Verdict: Deny, Host: "h", Reason: "no rule allows it"})
	l.Record(Entry{Sandbox: "t", Kind: Request, Verdict: Allow})
	l.Forget("s")

	type line struct {
		Level, Sandbox, Host, Reason string
		Suppressed                   int
	}
	var lines []line
	for d := json.NewDecoder(&out); d.More(); {
		var one line
		if err := d.Decode(&one); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, one)
	}
	want := []line{
		{Level: "INFO", Sandbox: "s"}, {Level: "INFO", Sandbox: "s"}, {Level: "INFO", Sandbox: "s"},
		{Level: "WARN", Sandbox: "s", Host: "h", Reason: "no rule allows it"},
		{Level: "INFO", Sandbox: "t"},
		{Level: "INFO", Sandbox: "s", Suppressed: 2},
	}
	if fmt.Sprint(lines) != fmt.Sprint(want) {
		t.Errorf("got  %v\nwant %v", lines, want)
	}
}

func TestLinesHaveTheNameOfTheSandbox(t *testing.T) {
	var out bytes.Buffer
	names := map[string]string{"s": "shop"}
	l := New(slog.New(slog.NewTextHandler(&out, nil)), func(id string) string { return names[id] })
	l.Record(Entry{Sandbox: "s", Kind: Request, Verdict: Allow})
	l.Record(Entry{Sandbox: "operator", Kind: Request, Verdict: Allow})
	if got := out.String(); !strings.Contains(got, "sandbox=s sandbox_name=shop") || strings.Count(got, "name=") != 1 {
		t.Errorf("logged %q", got)
	}
}

func TestTheLineAfterSuppressedOnesCountsThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		l := newLog(slog.New(slog.NewTextHandler(&out, nil)))
		l.newLimit = func() *loglimit.Limit { return loglimit.New(1, 1) }
		defer l.Close()
		for range 1 + 7 {
			l.Record(Entry{Sandbox: "s", Verdict: Deny})
		}
		for range 2 {
			time.Sleep(time.Second)
			l.Record(Entry{Sandbox: "s", Verdict: Deny})
		}
		if n := strings.Count(out.String(), "suppressed=7"); n != 1 || strings.Count(out.String(), "\n") != 3 {
			t.Errorf("reported %d times: %s", n, &out)
		}
	})
}

func TestMetrics(t *testing.T) {
	l := newLog(slog.New(slog.DiscardHandler))
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(l)
	l.Record(Entry{Sandbox: "s", Kind: Request, Verdict: Allow, BytesOut: 5, BytesIn: 7, Duration: 20})
	l.Record(Entry{Sandbox: "s", Kind: Request, Verdict: Respond, BytesOut: 1})
	l.Record(Entry{Sandbox: "s", Kind: Connection, Verdict: Allow, BytesOut: 3, BytesIn: 4, Duration: 30})
	l.Record(Entry{Sandbox: "s", Kind: DNS, Verdict: Deny})
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, family := range families {
		for _, m := range family.Metric {
			name := family.GetName()
			for _, label := range m.Label {
				name += " " + label.GetValue()
			}
			got = append(got, fmt.Sprint(name, " ", m.GetCounter().GetValue()+float64(m.GetHistogram().GetSampleCount())))
		}
	}
	want := []string{
		"doze_egress_connection_bytes_total in 4", "doze_egress_connection_bytes_total out 3",
		"doze_egress_connection_duration_seconds 1", "doze_egress_connections_total allow 1",
		"doze_egress_dns_refusals_total 1", "doze_egress_log_lines_suppressed_total 0",
		"doze_egress_request_bytes_total in 7", "doze_egress_request_bytes_total out 6",
		"doze_egress_request_duration_seconds 2",
		"doze_egress_requests_total allow 1", "doze_egress_requests_total respond 1",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

func BenchmarkRecord(b *testing.B) {
	for name, log := range map[string]*slog.Logger{"kept": slog.New(slog.DiscardHandler), "logged": slog.New(slog.NewJSONHandler(discard{}, nil))} {
		b.Run(name, func(b *testing.B) {
			l := newLog(log)
			l.newLimit = func() *loglimit.Limit { return loglimit.New(1e9, 1<<30) }
			e := Entry{Sandbox: "s", Kind: Request, Verdict: Allow, Host: "api.example.com", Method: "GET", Path: "/user/repos",
				Rule: "node/x", Policies: []Policy{{"bearer", "sha256:0123456789abcdef"}}, Secrets: []string{"token"}, Status: 200}
			b.ReportAllocs()
			for b.Loop() {
				l.Record(e)
			}
		})
	}
}

type discard struct{}

func (discard) Write(b []byte) (int, error) { return len(b), nil }
