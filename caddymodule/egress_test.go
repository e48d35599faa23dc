package caddymodule

import (
	"fmt"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
)

func TestResolversHavePort53UnlessTheySayAnother(t *testing.T) {
	e := &Egress{Resolvers: []string{"10.1.2.53", "2001:db8::53", "[2001:db8::53]:5353"}}
	s, err := e.settings()
	if got := fmt.Sprint(s.NameServers); err != nil || got != "[10.1.2.53:53 [2001:db8::53]:53 [2001:db8::53]:5353]" {
		t.Errorf("%s, %v", got, err)
	}
	for _, wrong := range []string{"ns.corp", "", "10.1.2.53:dns", "10.1.2"} {
		e := &Egress{Resolvers: []string{wrong}}
		if _, err := e.settings(); err == nil || !strings.Contains(err.Error(), "write it like 10.1.2.3") {
			t.Errorf("%q: %v", wrong, err)
		}
	}
}

// Each rule is compiled once, not again with each later rule.
func TestParsingRulesAllocatesInProportionToTheirNumber(t *testing.T) {
	parse := func(rules int) float64 {
		var block strings.Builder
		block.WriteString("doze {\negress {\n")
		for i := range rules {
			fmt.Fprintf(&block, "rule r%d {\nhosts h%d.example.com preset:github\npaths /a/** /b\nallow\n}\n", i, i)
		}
		block.WriteString("}\n}\n")
		return testing.AllocsPerRun(1, func() {
			app, err := parseApp(caddyfile.NewTestDispenser(block.String()), nil)
			if err != nil || !strings.Contains(string(app.(httpcaddyfile.App).Value), fmt.Sprintf("h%d.", rules-1)) {
				t.Fatal(app, err)
			}
		})
	}
	if few, many := parse(100), parse(1000); many > 15*few {
		t.Errorf("1,000 rules take %.0f allocations, 100 rules %.0f", many, few)
	}
}
