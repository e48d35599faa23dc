package docs

import (
	"cmp"
	"encoding/json"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/testkit"
)

// notByCurl has the operations without a curl line in a page, with the reasons.
var notByCurl = map[string]string{
	"GET /sandbox/{id}/exec": "the command is a message of a WebSocket, and Debian's curl sends none; agents.md has it in Python and TypeScript",
	// TestOlderCopyOfTheStoreDestroysNoSandbox of test/e2e makes such containers.
	"POST /node/quarantine/{id}/adopt": "the node of a page has no container without a record",
	"DELETE /node/quarantine/{id}":     "the node of a page has no container without a record",
}

// operations returns the operations of the API, as METHOD PATH.
func operations(t *testing.T) []string {
	t.Helper()
	var document struct {
		Paths map[string]map[string]json.RawMessage `json:"paths"`
	}
	if err := json.Unmarshal([]byte(read(t, "docs/openapi.json")), &document); err != nil {
		t.Fatal(err)
	}
	var all []string
	for route, item := range document.Paths {
		for method := range item {
			if slices.Contains([]string{"get", "put", "post", "delete", "patch"}, method) {
				all = append(all, strings.ToUpper(method)+" "+route)
			}
		}
	}
	slices.Sort(all)
	if len(all) < 80 {
		t.Fatalf("docs/openapi.json has the operations %q", all)
	}
	return all
}

var (
	// helper is the function `api` of pages, which calls curl.
	helper = regexp.MustCompile(`(?m)^api\(\) \{.*\n  curl .*-X "\$1".*"\$DOZE_API\$2"$`)
	// byHelper and byCurl match calls up to the query.
	byHelper = regexp.MustCompile(`\bapi ([A-Z]+) ['"]?(/[^\s'"?;]*)`)
	byCurl   = regexp.MustCompile(`\bcurl .*?"\$DOZE_API(/[^\s"?]*)`)
	byOption = regexp.MustCompile(` (-X \S+|-T|-d) `)
)

// calls returns the calls of the API by curl in the blocks of a page that run in bash, as
// METHOD PATH.
func calls(blocks []block) []string {
	var all []string
	defined := false
	for _, b := range blocks {
		if b.language != "sh" || b.mark != "run" {
			continue
		}
		defined = defined || helper.MatchString(b.text)
		for line := range strings.Lines(strings.ReplaceAll(b.text, "\\\n", " ")) {
			for _, m := range byHelper.FindAllStringSubmatch(line, -1) {
				if defined {
					all = append(all, m[1]+" "+m[2])
				}
			}
			if m := byCurl.FindStringSubmatch(line); m != nil {
				all = append(all, methodOf(m[0])+" "+m[1])
			}
		}
	}
	return all
}

// methodOf returns the method of a call of curl, from its options.
func methodOf(line string) string {
	method := ""
	for _, m := range byOption.FindAllStringSubmatch(line, -1) {
		switch option := m[1]; {
		case strings.HasPrefix(option, "-X"):
			return strings.Trim(strings.TrimPrefix(option, "-X "), `'"`)
		case option == "-T":
			method = cmp.Or(method, "PUT")
		case option == "-d":
			method = cmp.Or(method, "POST")
		}
	}
	return cmp.Or(method, "GET")
}

// operationOf returns the operation of a call, or "". A path of more constant parts wins.
func operationOf(call string, operations []string) string {
	found, fewest := "", 0
	for _, operation := range operations {
		pattern := regexp.MustCompile(`\{\w+\}`).ReplaceAllString(operation, "*")
		variables := strings.Count(pattern, "*")
		if ok, err := path.Match(pattern, call); err == nil && ok && (found == "" || variables < fewest) {
			found, fewest = operation, variables
		}
	}
	return found
}

func TestEveryOperationHasACurlLineThatRuns(t *testing.T) {
	all := operations(t)
	shown := map[string]bool{}
	for _, page := range pages(t) {
		if path.Dir(page) != "docs" {
			continue
		}
		blocks, err := parse(read(t, page))
		if err != nil {
			t.Fatalf("%s: %v", page, err)
		}
		for _, call := range calls(blocks) {
			operation := operationOf(call, all)
			if operation == "" {
				t.Errorf("%s calls %s, which docs/openapi.json does not have", page, call)
			}
			shown[operation] = true
		}
	}
	for _, operation := range all {
		if !shown[operation] && notByCurl[operation] == "" {
			t.Errorf("no page has a curl line for %s in a block `sh run`", operation)
		}
	}
	for operation := range maps.Keys(notByCurl) {
		if shown[operation] || !slices.Contains(all, operation) {
			t.Errorf("notByCurl has %s, which a page shows or the API does not have", operation)
		}
	}
}

func TestCallsOfPagesAreFound(t *testing.T) {
	const define = "```sh run\napi() { # METHOD PATH\n  curl -X \"$1\" \"${@:3}\" \"$DOZE_API$2\"\n}\n```\n"
	for text, want := range map[string][]string{
		"```sh run\napi GET /node\n```":                                                        nil,
		define + "```sh norun=\"why\"\napi GET /node\n```":                                     nil,
		define + "```sh run session=a\nx=$(api GET '/sandbox?a=b' | jq .)\n```":                {"GET /sandbox"},
		define + "```sh run\napi POST \"/sandbox/lab/contexts/$1/run\" -d x\n```":              {"POST /sandbox/lab/contexts/$1/run"},
		define + "```sh run\napi GET /a; api DELETE /b\n```":                                   {"GET /a", "DELETE /b"},
		"```sh run\ncurl -sS \"$DOZE_API/node?a=b\"\ncurl -sS \"$url\"\n```":                   {"GET /node"},
		"```sh run\ncurl -sS -H 'A: b' -d x \\\n  \"$DOZE_API/sandbox\" | jq\n```":             {"POST /sandbox"},
		"```sh run\necho | curl -T - \"$DOZE_API/f\"\ncurl -X PATCH -d x \"$DOZE_API/g\"\n```": {"PUT /f", "PATCH /g"},
	} {
		blocks, err := parse(text)
		if err != nil {
			t.Fatal(err)
		}
		testkit.Diff(t, "the calls of "+text, calls(blocks), want)
	}
	all := []string{"GET /egress/{name}", "GET /egress/rules", "GET /sandbox/{id}/ports", "POST /egress/rules"}
	for call, want := range map[string]string{
		"GET /egress/rules": "GET /egress/rules", "GET /egress/ca": "GET /egress/{name}", "GET /sandbox/$1/ports": "GET /sandbox/{id}/ports",
		"GET /sandbox/ports": "", "GET /sandbox/a/b/ports": "", "PUT /egress/rules": "",
	} {
		if got := operationOf(call, all); got != want {
			t.Errorf("%s is %q, not %q", call, got, want)
		}
	}
}
