package caddymodule

import (
	"fmt"
	"strings"
	"testing"
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
