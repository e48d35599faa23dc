package api

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/doze-run/doze/problem"
)

// readTree returns the document as JSON, as the node serves it.
func readTree(t *testing.T) openAPIDocument {
	t.Helper()
	_, text := readDocument(t)
	d := openAPIDocument{}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// namesOf returns the names of operations whose description f accepts.
func (d openAPIDocument) namesOf(f func(operation map[string]any) bool) []string {
	names := []string{}
	for path, operations := range field(d, "paths") {
		for method, operation := range operations.(map[string]any) {
			if f(operation.(map[string]any)) {
				names = append(names, strings.ToUpper(method)+" "+path)
			}
		}
	}
	slices.Sort(names)
	return names
}

func TestDocumentIsTheSameEachTime(t *testing.T) {
	_, first := readDocument(t)
	_, second := readDocument(t)
	if diff := cmp.Diff(string(first), string(second)); diff != "" {
		t.Errorf("two documents differ (-first +second):\n%s", diff)
	}
}

// A newer node may send more fields. It still refuses fields that it does not know.
func TestResponsesArePermittedNewFields(t *testing.T) {
	d := readTree(t)
	closed := func(roots ...any) (schemas []string) {
		visited := map[string]bool{}
		for _, root := range roots {
			d.eachSchema(root, visited, func(object map[string]any) {
				if object["additionalProperties"] == false {
					schemas = append(schemas, strings.Join(slices.Sorted(maps.Keys(field(object, "properties"))), " "))
				}
			})
		}
		return schemas
	}
	responses := 0
	d.eachResponse(func(status string, response map[string]any) {
		responses++
		for _, schema := range closed(response) {
			t.Errorf("a response with status %s permits no fields other than %s", status, schema)
		}
	})
	if responses < 500 {
		t.Errorf("only %d responses", responses)
	}
	bodies := 0
	d.eachOperation(func(operation map[string]any) {
		if body, ok := operation["requestBody"]; ok {
			bodies += len(closed(body))
		}
	})
	if bodies < 10 {
		t.Errorf("only %d request bodies are closed", bodies)
	}
}

func TestEveryOperationDescribesUnknownProblems(t *testing.T) {
	d := readTree(t)
	without := d.namesOf(func(operation map[string]any) bool {
		schema := field(operation, "responses", "default", "content", "application/problem+json", "schema")
		return schema["$ref"] != "#/components/schemas/Problem"
	})
	if len(without) > 0 {
		t.Errorf("no default response: %v", without)
	}
}

// Generated clients send no token to a route whose list of schemes is empty. Without
// a list they would use the document's.
func TestOpenRoutesListNoSecurity(t *testing.T) {
	d := readTree(t)
	open := d.namesOf(func(operation map[string]any) bool {
		schemes, ok := operation["security"].([]any)
		return ok && len(schemes) == 0
	})
	if diff := cmp.Diff([]string{"GET /openapi.json"}, open); diff != "" {
		t.Errorf("routes without a token differ (-want +got):\n%s", diff)
	}
	unlisted := d.namesOf(func(operation map[string]any) bool { return operation["security"] == nil })
	if len(unlisted) > 0 {
		t.Errorf("security is missing: %v", unlisted)
	}
}

func TestTagsAreDescribed(t *testing.T) {
	d := readTree(t)
	used := map[string]bool{}
	d.eachOperation(func(operation map[string]any) {
		for _, tag := range operation["tags"].([]any) {
			used[tag.(string)] = true
		}
	})
	var described []string
	for _, tag := range d["tags"].([]any) {
		tag := tag.(map[string]any)
		if text := tag["description"].(string); len(text) < 10 || !strings.HasSuffix(text, ".") {
			t.Errorf("tag %s has the description %q", tag["name"], text)
		}
		described = append(described, tag["name"].(string))
	}
	slices.Sort(described)
	if diff := cmp.Diff(slices.Sorted(maps.Keys(used)), described); diff != "" {
		t.Errorf("tags differ (-used +described):\n%s", diff)
	}
}

func TestResponseHeadersAreDescribed(t *testing.T) {
	d := readTree(t)
	headers := field(d, "components", "headers")
	for name, header := range headers {
		if text, _ := header.(map[string]any)["description"].(string); text == "" {
			t.Errorf("header %s has no description", name)
		}
	}
	sent := map[string]int{}
	responses := 0
	d.eachResponse(func(status string, response map[string]any) {
		responses++
		for name, header := range field(response, "headers") {
			sent[name]++
			if ref := header.(map[string]any)["$ref"]; ref != "#/components/headers/"+name || headers[name] == nil {
				t.Errorf("the header %s of a response with status %s refers to %v", name, status, ref)
			}
		}
	})
	if sent["X-Request-Id"] != responses {
		t.Errorf("%d of %d responses have X-Request-Id", sent["X-Request-Id"], responses)
	}
	etags := d.namesOf(func(operation map[string]any) bool {
		return field(operation, "responses", "200", "headers")["ETag"] != nil
	})
	if diff := cmp.Diff([]string{
		"GET /egress/rules", "GET /sandbox/{id}/egress/rules", "GET /sandbox/{id}/files/read",
		"PUT /egress/rules", "PUT /sandbox/{id}/egress/rules",
	}, etags); diff != "" {
		t.Errorf("routes with an ETag differ (-want +got):\n%s", diff)
	}
	if field(d, "paths", "/sandbox", "post", "responses", "201", "headers")["Location"] == nil {
		t.Error("POST /sandbox has no Location")
	}
}

// Huma has schemas of its own, and a keyword that OpenAPI does not have.
func TestDocumentIsFreeOfHumasOwn(t *testing.T) {
	d := readTree(t)
	for _, name := range []string{"ErrorModel", "ErrorDetail"} {
		if d.schemas()[name] != nil {
			t.Errorf("schema %s", name)
		}
	}
	eachObject(map[string]any(d), func(object map[string]any) {
		if text, ok := object["patternDescription"]; ok {
			t.Errorf("patternDescription %v", text)
		}
	})
	a := newAPI(t, Config{Sandboxes: nobody{}})
	if schema := a.huma.OpenAPI().Components.Schemas.Map()["Problem"]; schema.AdditionalProperties != false {
		t.Errorf("the document's passes changed huma's schema: additionalProperties is %v", schema.AdditionalProperties)
	}
}

func TestWebSocketHasNoOtherSuccess(t *testing.T) {
	d := readTree(t)
	responses := field(d, "paths", "/sandbox/{id}/exec", "get", "responses")
	if responses["101"] == nil || responses["200"] != nil {
		t.Errorf("responses are %v", slices.Sorted(maps.Keys(responses)))
	}
}

func TestProblemsHaveTheirHeadersAndExamples(t *testing.T) {
	d := readTree(t)
	examples := field(d, "components", "examples")
	retries := 0
	for path, operations := range field(d, "paths") {
		for method, operation := range operations.(map[string]any) {
			for status, response := range field(operation.(map[string]any), "responses") {
				name, response := method+" "+path+" "+status, response.(map[string]any)
				listed := field(response, "content", problem.ContentType, "examples")
				headers := field(response, "headers")
				if status < "400" {
					if len(listed) > 0 || headers[problem.HeaderError] != nil {
						t.Errorf("%s has problems", name)
					}
					continue
				}
				if len(listed) == 0 || headers[problem.HeaderError] == nil {
					t.Errorf("%s: %d examples, headers %v", name, len(listed), headers)
				}
				retry := false
				for code := range listed {
					p := field(examples, code, "value")
					if p["code"] != code || status != "default" && fmt.Sprint(p["status"]) != status {
						t.Errorf("%s: the example of %s is %v", name, code, p)
					}
					definition := slices.IndexFunc(problem.All(), func(d problem.Definition) bool { return d.Name == code })
					retry = retry || problem.All()[definition].RetryAfter > 0
				}
				if retry {
					retries++
				}
				if retry != (headers["Retry-After"] != nil) {
					t.Errorf("%s: Retry-After is %v", name, headers["Retry-After"])
				}
			}
		}
	}
	if retries < 50 {
		t.Errorf("only %d responses with Retry-After", retries)
	}
}
