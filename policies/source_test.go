package policies_test

import (
	"io/fs"
	"os"
	"slices"
	"testing"

	"github.com/doze-run/doze/policies"
)

func TestEveryPolicyIsShippedWithItsPage(t *testing.T) {
	entries, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, e := range entries {
		if _, err := os.Stat(e.Name() + "/main.go"); err == nil {
			want = append(want, e.Name())
		}
	}
	if got := policies.Names(); !slices.Equal(got, want) {
		t.Errorf("shipped are %v, there are %v", got, want)
	}
	for _, name := range policies.Names() {
		source, ok := policies.Source(name)
		if !ok {
			t.Fatal(name)
		}
		for _, file := range []string{"README.md", "main.go", "policy_test.go", "request.json", "tests.json"} {
			if _, err := fs.Stat(source, file); err != nil {
				t.Error(name, err)
			}
		}
	}
	if _, ok := policies.Source("none"); ok {
		t.Error("there is a policy that is none")
	}
}

func TestTheSDKIsEmbedded(t *testing.T) {
	for _, file := range []string{"policy.go", "internal/abi/wasm.go", "internal/decode/decode.go", "sdktest/sdktest.go"} {
		if _, err := fs.Stat(policies.SDK(), file); err != nil {
			t.Error(err)
		}
	}
}
