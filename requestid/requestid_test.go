package requestid_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/doze-run/doze/requestid"
)

func TestOfAcceptsWellFormedIDsOnly(t *testing.T) {
	for id, accepted := range map[string]bool{
		"a": true, "0f7c-req_1.2": true, strings.Repeat("a", 64): true,
		"": false, strings.Repeat("a", 65): false, "a b": false, "a\nb": false, "é": false, `"`: false, "<b>": false,
	} {
		r := &http.Request{Header: http.Header{requestid.Header: {id}}}
		got := requestid.Of(r)
		if (got == id) != accepted || requestid.Or(got) != got {
			t.Errorf("%q became %q", id, got)
		}
	}
	if got := requestid.Of(&http.Request{Header: http.Header{requestid.Header: {"a", "b"}}}); got == "a" || got == "b" {
		t.Errorf("one of two ids was accepted: %q", got)
	}
	if none := (&http.Request{Header: http.Header{}}); requestid.Of(none) == requestid.Of(none) {
		t.Error("two requests have the same id")
	}
}
