package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/miekg/dns"

	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/runtime/netns/link"
	"github.com/doze-run/doze/runtime/store/document"
	"github.com/doze-run/doze/runtime/store/storetest"
	"github.com/doze-run/doze/testkit"
)

func openNames(t *testing.T, d document.Store) *nameBook {
	t.Helper()
	b, err := openNameBook(testkit.Context(t), d, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.close)
	return b
}

func addr(n int) netip.Addr {
	return netip.AddrFrom4([4]byte{198, 18, byte(1 + n>>8), byte(n)})
}

func TestAllNamesOfASandboxAreStored(t *testing.T) {
	d := &documents{Badger: storetest.New(t)}
	b := openNames(t, d)
	const most = 8192
	for n := range most {
		b.record("k3f9x2m7q1az", strings.Repeat("a", 60)+fmt.Sprintf("%d.", n)+strings.Repeat("b.", 90)+"test", addr(n))
	}
	b.record("other0000000", "b.test", addr(1))
	b.close()
	again := openNames(t, d)
	if got := again.known("k3f9x2m7q1az"); len(got) != most || got[addr(300)] != b.known("k3f9x2m7q1az")[addr(300)] {
		t.Errorf("%d are stored", len(got))
	}
	if err := again.forget(testkit.Context(t), "k3f9x2m7q1az"); err != nil {
		t.Fatal(err)
	}
	if left := d.named(t, ""); len(left) != 1 || !strings.Contains(left[0], "other0000000") {
		t.Errorf("left is %v", left)
	}
}

// slowDocuments blocks each write until goOn.
type slowDocuments struct {
	*documents
	reached chan string
	goOn    chan struct{}
}

func (d *slowDocuments) PutDocument(ctx context.Context, kind, name string, value []byte) error {
	d.reached <- string(value)
	<-d.goOn
	return d.documents.PutDocument(ctx, kind, name, value)
}

func TestForgottenNamesAreNotWrittenByAnEarlierFlush(t *testing.T) {
	d := &slowDocuments{&documents{Badger: storetest.New(t)}, make(chan string), make(chan struct{})}
	b, err := openNameBook(testkit.Context(t), d, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	b.record("k3f9x2m7q1az", "a.test", addr(1))
	var writers sync.WaitGroup
	writers.Go(b.flush)
	if first := <-d.reached; !strings.Contains(first, "a.test") {
		t.Fatalf("%q is written", first)
	}
	b.record("k3f9x2m7q1az", "", addr(1)) // does not wait for the disk
	writers.Go(b.flush)
	select {
	case early := <-d.reached:
		t.Errorf("%q is written before the first has been", early)
	default:
	}
	d.goOn <- struct{}{}
	if second := <-d.reached; strings.Contains(second, "a.test") {
		t.Errorf("%q is written", second)
	}
	d.goOn <- struct{}{}
	writers.Wait()
	b.close()
	if got := openNames(t, d.documents).known("k3f9x2m7q1az"); len(got) != 0 {
		t.Errorf("after a restart there is %v", got)
	}
}

func TestUnwrittenNamesAreWrittenLater(t *testing.T) {
	d := &documents{Badger: storetest.New(t)}
	b := openNames(t, d)
	d.failWith(errors.New("the disk is full"))
	b.record("k3f9x2m7q1az", "a.test", addr(1))
	b.flush()
	d.failWith(nil)
	b.flush()
	if got := openNames(t, d).known("k3f9x2m7q1az"); got[addr(1)] != "a.test" {
		t.Errorf("got %v", got)
	}
}

func TestBothNameServersRefuseNames(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.rules(rule.Rule{Name: "no", Hosts: []string{"a.web.test"}, Action: rule.Deny})
	query, err := new(dns.Msg).SetQuestion("a.web.test.", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	for server, want := range map[netip.Addr]int{link.Gateway: dns.RcodeRefused, link.SecondServer: dns.RcodeNameError} {
		var answer dns.Msg
		if err := answer.Unpack(b.find(b.sb.ID).DNS(testkit.Context(t), server, query)); err != nil || answer.Rcode != want {
			t.Errorf("%s: %v, %v", server, &answer, err)
		}
	}
}

func TestUnreadableNamesAreIgnored(t *testing.T) {
	d := &documents{Badger: storetest.New(t)}
	if err := d.PutDocument(testkit.Context(t), namesKind, "k3f9x2m7q1az/198.18.1.0", []byte("no JSON")); err != nil {
		t.Fatal(err)
	}
	b := openNames(t, d)
	if got := b.known("k3f9x2m7q1az"); len(got) != 0 {
		t.Errorf("got %v", got)
	}
	if err := b.forget(testkit.Context(t), "k3f9x2m7q1az"); err != nil || len(d.named(t, "k3f9")) != 0 {
		t.Errorf("when the sandbox is forgotten %v is left, %v", d.named(t, ""), err)
	}
}
