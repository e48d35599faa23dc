package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/danielgtaylor/huma/v2"
	"github.com/google/go-cmp/cmp"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// readTree returns the document as JSON.
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
	first, second := generate(t), generate(t)
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
		"PUT /egress/rules", "PUT /sandbox/{id}/egress/rules", "PUT /sandbox/{id}/files/write",
	}, etags); diff != "" {
		t.Errorf("routes with an ETag differ (-want +got):\n%s", diff)
	}
	if field(d, "paths", "/sandbox", "post", "responses", "201", "headers")["Location"] == nil {
		t.Error("POST /sandbox has no Location")
	}
	if field(d, "paths", "/sandbox/{id}/process", "post", "responses", "201", "headers")["Location"] == nil {
		t.Error("POST /sandbox/{id}/process has no Location")
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
	a := newAPI(t, Config{})
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

// TestDocumentIsCommitted makes each change of the API a change of docs/openapi.json.
func TestDocumentIsCommitted(t *testing.T) {
	_, text := readDocument(t)
	testkit.Golden(t, "../docs/openapi.json", text)
}

func TestExamplesAreOfTheirTypes(t *testing.T) {
	a := newAPI(t, Config{})
	seen := map[reflect.Type]bool{}
	checked := 0
	for _, row := range schemaDocs() {
		kind := reflect.TypeOf(row.example)
		if seen[kind] {
			t.Errorf("%s has two rows", kind)
		}
		seen[kind] = true
		if !strings.HasSuffix(row.description, ".") {
			t.Errorf("%s has the description %q", kind, row.description)
		}
		sent, err := json.Marshal(row.example)
		if err != nil {
			t.Fatal(err)
		}
		decoded := reflect.New(kind)
		dec := json.NewDecoder(bytes.NewReader(sent))
		dec.DisallowUnknownFields()
		if err := dec.Decode(decoded.Interface()); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
		again, err := json.Marshal(decoded.Interface())
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(sent), string(again)); diff != "" {
			t.Errorf("%s changes when it is decoded (-sent +decoded):\n%s", kind, diff)
		}
		schema := a.huma.OpenAPI().Components.Schemas.Map()[huma.DefaultSchemaNamer(kind, "")]
		if schema == nil {
			continue // no route sends or receives it
		}
		checked++
		var example any
		if err := json.Unmarshal(sent, &example); err != nil {
			t.Fatal(err)
		}
		var result huma.ValidateResult
		huma.Validate(a.huma.OpenAPI().Components.Schemas, schema, huma.NewPathBuffer(nil, 0), huma.ModeReadFromServer, example, &result)
		for _, err := range result.Errors {
			t.Errorf("%s: %v", kind, err)
		}
	}
	if checked < 50 {
		t.Errorf("only %d examples of schemas in the document", checked)
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

// The rules of docs/reference/compatibility.md.
func TestNamesFollowTheRules(t *testing.T) {
	snakeCase := regexp.MustCompile(`\A[a-z][a-z0-9]*(_[a-z0-9]+)*\z`)
	kebabCase := regexp.MustCompile(`\A[a-z]+(-[a-z]+)*\z`)
	d := readTree(t)
	properties, times, pages := 0, 0, 0
	for schema, described := range d.schemas() {
		for name, property := range field(described.(map[string]any), "properties") {
			properties++
			property := property.(map[string]any)
			if !snakeCase.MatchString(name) {
				t.Errorf("%s.%s is not in snake_case", schema, name)
			}
			if property["format"] == "date-time" {
				times++
				if !strings.HasSuffix(name, "_at") && !slices.Contains([]string{"time", "since", "until", "state_since", "hold_until"}, name) {
					t.Errorf("%s.%s is a time and does not end in _at", schema, name)
				}
			}
			values, _ := property["enum"].([]any)
			for _, value := range values {
				if value, _ := value.(string); !snakeCase.MatchString(value) && value != "utf-8" {
					t.Errorf("%s.%s has the value %q, which is not in snake_case", schema, name, value)
				}
			}
		}
	}
	for path, operations := range field(d, "paths") {
		for method, operation := range operations.(map[string]any) {
			operation := operation.(map[string]any)
			if id := operation["operationId"].(string); !kebabCase.MatchString(id) {
				t.Errorf("%s %s has the id %q, which is not in kebab-case", method, path, id)
			}
			parameters, _ := operation["parameters"].([]any)
			var queries []string
			for _, parameter := range parameters {
				parameter := parameter.(map[string]any)
				if name := parameter["name"].(string); parameter["in"] == "query" {
					queries = append(queries, name)
					if !snakeCase.MatchString(name) {
						t.Errorf("%s %s: the parameter %s is not in snake_case", method, path, name)
					}
				}
			}
			ref, _ := field(operation, "responses", "200", "content", "application/json", "schema")["$ref"].(string)
			body := field(d.schemas(), strings.TrimPrefix(ref, schemasPrefix), "properties")
			paged := slices.Contains(queries, "cursor")
			if paged {
				pages++
			}
			if paged != slices.Contains(queries, "limit") || paged != (body["next_cursor"] != nil) {
				t.Errorf("%s %s: the parameters are %v, next_cursor is %v", method, path, queries, body["next_cursor"])
			}
		}
	}
	if properties < 200 || times < 15 || pages < 5 {
		t.Errorf("only %d properties, %d times, %d pages", properties, times, pages)
	}
}

// checkDescribed reports objects of the document without a description.
func checkDescribed(t *testing.T, name string, object map[string]any) {
	t.Helper()
	if text, _ := object["description"].(string); text == "" {
		t.Errorf("%s has no description", name)
	}
}

func TestEverySchemaHasADescriptionAndExamples(t *testing.T) {
	d, registry := readTree(t), newAPI(t, Config{}).huma.OpenAPI().Components.Schemas
	properties := 0
	for name, schema := range d.schemas() {
		schema := schema.(map[string]any)
		checkDescribed(t, name, schema)
		if schema["examples"] == nil {
			t.Errorf("%s has no example", name)
		}
		for field, property := range field(schema, "properties") {
			properties++
			property := property.(map[string]any)
			checkDescribed(t, name+"."+field, property)
			items, _ := property["items"].(map[string]any)
			if property["examples"] == nil && property["enum"] == nil && property["$ref"] == nil && items["$ref"] == nil {
				t.Errorf("%s.%s has no example", name, field)
			}
			examples, _ := property["examples"].([]any)
			for _, example := range examples {
				var result huma.ValidateResult
				huma.Validate(registry, registry.Map()[name].Properties[field], huma.NewPathBuffer(nil, 0), huma.ModeReadFromServer, example, &result)
				for _, err := range result.Errors {
					t.Errorf("%s.%s: the example %v: %v", name, field, example, err)
				}
			}
		}
	}
	if properties < 200 {
		t.Errorf("only %d properties", properties)
	}
}

func TestEveryOperationHasDescriptionsAndExamples(t *testing.T) {
	bodies, parameters := 0, 0
	checkExamples := func(name string, content map[string]any) {
		for kind, media := range content {
			media := media.(map[string]any)
			if schema := field(media, "schema"); schema["format"] == "binary" || kind == "application/json" && len(schema) == 1 {
				continue // raw bytes, and the document itself
			}
			bodies++
			if media["example"] == nil && media["examples"] == nil {
				t.Errorf("%s: %s has no example", name, kind)
			}
		}
	}
	for path, operations := range field(readTree(t), "paths") {
		for method, operation := range operations.(map[string]any) {
			name, operation := strings.ToUpper(method)+" "+path, operation.(map[string]any)
			checkDescribed(t, name, operation)
			if text, _ := operation["summary"].(string); text == "" || strings.HasSuffix(text, ".") {
				t.Errorf("%s has the summary %q", name, text)
			}
			list, _ := operation["parameters"].([]any)
			for _, parameter := range list {
				parameters++
				parameter := parameter.(map[string]any)
				checkDescribed(t, fmt.Sprintf("%s: the parameter %v", name, parameter["name"]), parameter)
				if parameter["example"] == nil {
					t.Errorf("%s: the parameter %v has no example", name, parameter["name"])
				}
			}
			if body, ok := operation["requestBody"].(map[string]any); ok {
				checkDescribed(t, name+": the body", body)
				checkExamples(name+" request", field(body, "content"))
			}
			for status, response := range field(operation, "responses") {
				response := response.(map[string]any)
				checkDescribed(t, name+" "+status, response)
				checkExamples(name+" "+status, field(response, "content"))
			}
		}
	}
	if bodies < 500 || parameters < 80 {
		t.Errorf("only %d bodies and %d parameters", bodies, parameters)
	}
}
