// test_theory.c: do the theorems of dev/theory/ hold in this code's numbers, and would their checks notice if not?
//
//   cc -O2 -std=gnu11 -Wall -Wextra dev/test/test_theory.c -o build/test_theory -lcriterion -lcjson -lpcre2-8 -lz -lm
//
// Each program's check is run as it is, and then with a mistake made on purpose: a term left out of a formula, a wrong
// sign, a state that breaks a condition of the theorem. Tables: run the programs themselves, or this one with THEORY=1.
#define TESTING_THEORY
#include "../theory/theorem_2_2.c"
#include "../theory/theorem_2_3.c"
#include "../theory/theorem_3_1.c"
#include "../theory/theorem_3_2.c"
#include "../theory/preconditioner.c"

#include <criterion/criterion.h>

// Criterion's own leaks, and the students that live until their test's process ends, would fail every sanitized run.
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "detect_leaks=0"; }

TestSuite(theory, .timeout = 120);

static int verbose(void) { return getenv("THEORY") != NULL; }

Test(theory, theorem_2_2_scale_vectors_speed_up) { cr_assert(theorem_2_2(verbose(), T22_RIGHT) == 0); }
Test(theory, theorem_2_2_notices_a_missing_outer_product) { cr_assert(theorem_2_2(0, T22_NO_OUTER_PRODUCT) == 1); }
Test(theory, theorem_2_2_notices_a_frozen_gamma) { cr_assert(theorem_2_2(0, T22_FROZEN_GAMMA) == 1); }

Test(theory, theorem_2_3_decay_bounds_input_scales) { cr_assert(theorem_2_3(verbose(), T23_RIGHT) == 0); }
Test(theory, theorem_2_3_notices_decay_of_the_wrong_sign) { cr_assert(theorem_2_3(0, T23_WRONG_SIGN) == 1); }
Test(theory, theorem_2_3_notices_gamma_without_decay) { cr_assert(theorem_2_3(0, T23_NO_DECAY_OF_GAMMA) == 1); }

Test(theory, theorem_3_1_dual_placement_is_at_least_as_fast) { cr_assert(theorem_3_1(verbose(), T31_RIGHT) == 0); }
Test(theory, theorem_3_1_notices_another_gamma) { cr_assert(theorem_3_1(0, T31_OWN_GAMMA) == 1); }
Test(theory, theorem_3_1_notices_a_state_off_the_invariant) { cr_assert(theorem_3_1(0, T31_SMALL_A) == 1); }

Test(theory, theorem_3_2_magnitude_is_d_times_as_fast) { cr_assert(theorem_3_2(verbose(), T32_RIGHT) == 0); }
Test(theory, theorem_3_2_notices_a_missing_factor_d) { cr_assert(theorem_3_2(0, T32_NO_FACTOR_D) == 1); }
Test(theory, theorem_3_2_notices_an_inverted_rho) { cr_assert(theorem_3_2(0, T32_INVERSE_RHO) == 1); }
Test(theory, theorem_3_2_notices_rho_below_1) { cr_assert(theorem_3_2(0, T32_SMALL_RHO) == 1); }

Test(theory, preconditioner_moves_effective_weights) { cr_assert(preconditioner(verbose(), PRE_RIGHT) == 0); }
Test(theory, preconditioner_notices_branches_left_out) { cr_assert(preconditioner(0, PRE_ONE_BRANCH) == 1); }
Test(theory, preconditioner_notices_scale_vectors_left_out) { cr_assert(preconditioner(0, PRE_MATRIX_ONLY) == 1); }
Test(theory, preconditioner_notices_or_taken_for_gamma) { cr_assert(preconditioner(0, PRE_OR_AS_NONE) == 1); }
