package egress

import (
	"testing"

	"github.com/doze-run/doze/egress/internal/wat"
	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/testkit"
)

// logging returns a policy that logs a line at a level for each request.
func logging(level int, text string) []byte {
	imports := append(imports[:len(imports):len(imports)], wat.Import{Module: "http_handler", Name: "log", Params: i32s(3)})
	return wat.Handler(imports, memoryWith(text), wat.Code(numbers(level, textAt, len(text)), wat.Call(len(imports)-1), next), wat.End).Binary()
}

func TestOwnersReadTheLogsOfTheirPolicies(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.push("one", logging(-1, "seen"))
	b.push("two", logging(-1, "seen"))
	first, second := through("one.web.test", "one", ""), through("two.web.test", "two", "")
	second.Name = "second"
	b.rules(first, second)
	lines, stop := r.PolicyLogs.Follow(policylog.Policy{Owner: owner, Name: "one"}, policylog.Filter{})
	defer stop()
	b.want(b.get("https://one.web.test/"), 200, "this is")
	flow := b.entry("one.web.test", nil)
	kept := r.PolicyLogs.Lines(policylog.Policy{Owner: owner, Name: "one"}, policylog.Filter{})
	if len(kept) != 1 || kept[0] != <-lines {
		t.Fatalf("got %+v", kept)
	}
	if got := kept[0]; got.Text != "seen" || got.Level != policylog.Debug || got.Flow != flow.Flow || got.Flow == "" ||
		got.Sandbox != "k3f9x2m7q1az" || got.SandboxName != b.sb.Name || got.Seq == 0 || got.Time.IsZero() {
		t.Errorf("got %+v", got)
	}
	for _, other := range [][2]string{{owner, "two"}, {operator, "one"}} {
		if got := r.PolicyLogs.Lines(policylog.Policy{Owner: other[0], Name: other[1]}, policylog.Filter{}); len(got) != 0 {
			t.Errorf("%v has %+v", other, got)
		}
	}
	b.rules()
	if err := r.DeletePolicy(testkit.Context(t), owner, "one"); err != nil {
		t.Fatal(err)
	}
	if _, ok := <-lines; ok || r.HasPolicy(owner, "one") || len(r.PolicyLogs.Lines(policylog.Policy{Owner: owner, Name: "one"}, policylog.Filter{})) != 0 {
		t.Error("lines of a policy that was deleted are left")
	}
}
